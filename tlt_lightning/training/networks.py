"""Run the networks that read a batch of rollouts: policy, critic and reference."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor, nn

from tlt_lightning.adapters import LoRA
from tlt_lightning.hidden_states import BatchTap
from tlt_lightning.model_files import checksum_of_weights
from tlt_lightning.objectives.base import PolicyObjective
from tlt_lightning.objectives.divergence import Divergence
from tlt_lightning.packed_pass import can_pack
from tlt_lightning.policy import ResponseTokens, Teacher, causal_lm, load_policy, response_logps
from tlt_lightning.rollout import RolloutBatch
from tlt_lightning.sharding.units import Sharding
from tlt_lightning.training.critic import Critic, CriticConfig
from tlt_lightning.training.fsdp2 import largest_counts
from tlt_lightning.training.micro_batches import cut_alike

log = logging.getLogger(__name__)


class Reference:
    """Freezes a model, or the policy with adapters off; no module, hidden from checkpoints.

    Args:
        path: Path or hub name of the model; None takes the policy without its adapters, at no cost in memory.
        attn_implementation: Attention of Hugging Face.
        sharding: How the model is sharded; None leaves it whole.
        is_half: Hold it in bfloat16.
    """

    def __init__(
        self, path: str | None, attn_implementation: str, sharding: Sharding | None = None, *, is_half: bool = False
    ) -> None:
        self.model = None
        if path is not None:
            model = load_policy(
                path, "reference", attn_implementation=attn_implementation, sharding=sharding, is_half=is_half
            )
            self.model = model.eval().requires_grad_(False)

    def logps(self, policy: nn.Module, batch: RolloutBatch) -> Tensor:
        """Return the log-probs of the response tokens, (B, T), on the batch's device."""
        if self.model is not None:
            return response_logps(self.model.to(batch.input_ids.device), batch)[0]
        with policy.disable_adapter():  # type: ignore[operator]
            return response_logps(policy, batch)[0]

    def teach(self, batch: RolloutBatch, divergence: Divergence) -> Teacher:
        """Return what the model makes of the response tokens, for a pass of the policy."""
        assert self.model is not None, "`RLModule` refuses a teacher that is the policy itself"
        return Teacher.of(self.model.to(batch.input_ids.device), batch, divergence)


@dataclass(frozen=True, slots=True)
class Networks:
    """Holds the networks of a run.

    Args:
        policy: The policy.
        critic: Predicts values; None where the objective needs none.
        reference: What a KL penalty is measured from, or the teacher; None likewise.
        divergence: How far the policy is from the reference as its teacher; None where it learns from none.
        tap: Around the policy's passes, if somebody asked for their states.
    """

    policy: nn.Module
    critic: Critic | None = None
    reference: Reference | None = None
    divergence: Divergence | None = None
    tap: BatchTap | None = None

    @property
    def trained(self) -> list[nn.Module]:
        """Return the language models that an update trains."""
        trunk = getattr(self.critic, "trunk", None)
        return [self.policy] if trunk is None else [self.policy, trunk]

    @property
    def is_padded(self) -> bool:
        """True if one of the networks cannot run a batch packed."""
        others = (getattr(self.critic, "trunk", None), getattr(self.reference, "model", None))
        return not all(can_pack(causal_lm(each).base_model) for each in (self.policy, *others) if each is not None)

    def forward(self, batch: RolloutBatch, *, needs_entropy_grad: bool = False) -> tuple[ResponseTokens, Tensor | None]:
        """Return what a pass computes of the response tokens, and values, (B, T). The teacher needs gradients."""
        teacher = None  # first, while the policy has kept nothing for its backward pass
        if self.divergence is not None and self.reference is not None and torch.is_grad_enabled():
            teacher = self.reference.teach(batch, self.divergence)
        # Not around the reference's pass, which may be one of the same network.
        with nullcontext() if self.tap is None else self.tap.over(batch.rows):
            tokens = response_logps(self.policy, batch, needs_entropy_grad=needs_entropy_grad, teacher=teacher)
        return tokens, None if self.critic is None else self.critic(batch, tokens.states, tokens.places)

    @torch.no_grad()
    def score(
        self, batch: RolloutBatch, max_tokens: int, trainer: L.Trainer, *, scores_policy: bool, scores_reference: bool
    ) -> RolloutBatch:
        """Return a rank's batch with what must be known before the update: log-probs, reference log-probs and values.

        Args:
            batch: A batch on the CPU, where the result is, too.
            max_tokens: Most tokens of a pass, the largest of which is run first.
            trainer: Says where the networks are, and how precise their passes.
            scores_policy: Run policy and critic.
            scores_reference: Run the reference, which otherwise teaches alone.
        """
        reference, scores = self.reference if scores_reference else None, dict[str, Tensor]()
        if not scores_policy and reference is None:
            return batch
        alike: dict[str, Any] = {"is_padded": self.is_padded, "largest_counts": largest_counts(trainer)}
        (plan,) = cut_alike([torch.arange(len(batch))], batch.lengths, max_tokens, **alike)
        for rows in plan:
            part = move_data_to_device(batch.select(rows), trainer.strategy.root_device)
            found = dict[str, Tensor | None]()
            with trainer.precision_plugin.forward_context():
                if scores_policy:
                    tokens, found["values"] = self.forward(part)
                    found["old_logps"] = tokens.logps
                if reference is not None:
                    found["ref_logps"] = reference.logps(self.policy, part)
            for name, result in found.items():
                if result is not None:
                    whole = scores.setdefault(name, torch.zeros_like(batch.rollout_logps))
                    whole[rows, : result.shape[1]] = result.float().cpu()
        return replace(batch, **scores)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class NetworkSettings:
    """Says which networks a run has: arguments of `RLModule`, which describes them."""

    policy: str
    reference: str | None
    critic: CriticConfig | None
    lora: LoRA | None
    gradient_checkpointing: bool
    attn_implementation: str

    def load(self, objective: PolicyObjective, sharding: Sharding | None, *, is_half: bool) -> Networks:
        """Load what an objective needs, whole or sharded; a teacher in bfloat16 where passes are (`is_half`).

        A reference is float32: the policy begins with its weights, and the KL between them with 0.
        """
        model = load_policy(
            self.policy, lora=self.lora, attn_implementation=self.attn_implementation, sharding=sharding
        )
        if self.gradient_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            if self.lora is not None:
                model.enable_input_require_grads()
        critic = reference = None
        if objective.needs_critic and self.critic is not None:
            critic = Critic(self.critic, causal_lm(model).config.hidden_size, sharding)
        if objective.uses_reference:
            path = self.reference or (self.policy if self.lora is None else None)
            is_half = is_half and objective.divergence is not None
            reference = Reference(path, self.attn_implementation, sharding, is_half=is_half)
        for name, loaded in (("critic", critic), ("reference", reference)):
            if getattr(self, name) is not None and loaded is None:
                log.warning(
                    "`model.%s` is given, and `model.objective` %s uses none: it is not loaded. Leave it out, or "
                    "choose an objective that does.",
                    name,
                    type(objective).__name__,
                )
        return Networks(model, critic, reference)

    def checksums(self, objective: PolicyObjective) -> dict[str, int]:
        """Return a number for the files of each model whose weights stay as they are, and are in no checkpoint."""
        paths = {"reference": self.reference if objective.uses_reference else None}
        if self.lora is not None or (objective.uses_reference and self.reference is None):
            paths["policy"] = self.policy
        return {
            f"checksum of the weights of model.{name}": checksum_of_weights(path)
            for name, path in paths.items()
            if path
        }

    def check_loaded(self, loaded: NetworkSettings, networks: Networks, objective: PolicyObjective) -> None:
        """Raise ValueError unless these are the networks that an earlier run has loaded, and all that are needed."""
        remedy = "The networks are loaded: make a new `RLModule`, to go on with what `export` writes as its `policy`."
        for name in (item.name for item in fields(self)):
            if (now := getattr(self, name)) != (before := getattr(loaded, name)):
                raise ValueError(f"`model.{name}` was {before!r} and is {now!r}. {remedy}")
        for name, is_needed in (("critic", objective.needs_critic), ("reference", objective.uses_reference)):
            if is_needed and getattr(networks, name) is None:
                raise ValueError(
                    f"`model.objective` {type(objective).__name__} needs a {name}, which was not loaded. {remedy}"
                )
