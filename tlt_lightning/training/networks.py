"""Run the networks that read a batch of rollouts: policy, critic and reference."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor, nn

from tlt_lightning.data.batch import RolloutBatch
from tlt_lightning.hidden_states import BatchTap
from tlt_lightning.objectives.base import PolicyObjective
from tlt_lightning.packed_pass import can_pack
from tlt_lightning.policy import LoRA, causal_lm, load_policy, response_logps
from tlt_lightning.sharding.units import Sharding
from tlt_lightning.training.critic import Critic, CriticConfig
from tlt_lightning.training.micro_batches import Agree, cut_alike
from tlt_lightning.training.reference import Reference


@dataclass(frozen=True, slots=True)
class Networks:
    """Holds the networks of a run.

    Args:
        policy: The policy.
        critic: Predicts values; None where the objective needs none.
        reference: What a KL penalty is measured from; None likewise.
        tap: Around the policy's passes, if somebody asked for their states.
    """

    policy: nn.Module
    critic: Critic | None = None
    reference: Reference | None = None
    tap: BatchTap | None = None

    @property
    def trained(self) -> list[nn.Module]:
        """Return the language models that an update trains."""
        trunk = getattr(self.critic, "trunk", None)
        return [self.policy] if trunk is None else [self.policy, trunk]

    @property
    def is_padded(self) -> bool:
        """True if one of them cannot run a batch packed."""
        others = (getattr(self.critic, "trunk", None), getattr(self.reference, "model", None))
        return not all(can_pack(causal_lm(each).base_model) for each in (self.policy, *others) if each is not None)

    def forward(self, batch: RolloutBatch, *, needs_entropy_grad: bool = False) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return log-probs, entropies and values of the response tokens, (B, T) each."""
        # Not around the reference's pass, which may be one of the same network.
        with nullcontext() if self.tap is None else self.tap.over(batch.rows):
            logps, entropy, states, index = response_logps(self.policy, batch, needs_entropy_grad=needs_entropy_grad)
        return logps, entropy, None if self.critic is None else self.critic(batch, states, index)

    def score(
        self,
        batch: RolloutBatch,
        max_tokens: int,
        device: torch.device,
        context: Callable[[], AbstractContextManager[Any]],
        agree: Agree | None = None,
        *,
        scores_policy: bool,
    ) -> RolloutBatch:
        """Fill in log-probs, reference log-probs and values of a rank's batch, largest pass first.

        Args:
            batch: On the CPU; the result stays there.
            max_tokens: Most tokens of a pass.
            device: Where the networks are.
            context: Made around each pass.
            agree: As in `cut_alike`.
            scores_policy: Run policy and critic, too, and not the reference alone.
        """
        if not scores_policy and self.reference is None:
            return batch
        scores: dict[str, Tensor] = {}
        everything = [torch.arange(len(batch))]
        for rows in cut_alike(everything, batch.lengths, max_tokens, is_padded=self.is_padded, agree=agree)[0]:
            part = move_data_to_device(batch.select(rows), device)
            results: dict[str, Tensor | None] = {}
            with context():
                if scores_policy:
                    results["old_logps"], _, results["values"] = self.forward(part)
                if self.reference is not None:
                    results["ref_logps"] = self.reference.logps(self.policy, part)
            for name, result in results.items():
                if result is not None:
                    whole = scores.setdefault(name, torch.zeros_like(batch.rollout_logps))
                    whole[rows, : result.shape[1]] = result.float().cpu()
        return replace(batch, **scores)  # type: ignore[arg-type]


def load_networks(
    policy: str,
    objective: PolicyObjective,
    *,
    lora: LoRA | None,
    reference: str | None,
    critic: CriticConfig | None,
    gradient_checkpointing: bool,
    attn_implementation: str,
    sharding: Sharding | None,
) -> Networks:
    """Load what an objective needs; the arguments are those of `RLModule`, and how models are sharded."""
    model = load_policy(policy, lora=lora, attn_implementation=attn_implementation, sharding=sharding)
    if gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if lora is not None:
            model.enable_input_require_grads()
    values = frozen = None
    if objective.needs_critic and critic is not None:
        values = Critic(critic, causal_lm(model).config.hidden_size, sharding)
    if objective.needs_reference:
        path = reference or (policy if lora is None else None)
        frozen = Reference(path, attn_implementation, sharding)
    return Networks(model, values, frozen)
