"""Train PPO's critic: a value head on the policy's trunk, or a model of its own."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tlt_lightning.adapters import LoRA
from tlt_lightning.arguments import CountOrZero, Positive, checked, text_of
from tlt_lightning.policy import causal_lm, load_policy, response_states, scatter
from tlt_lightning.rollout import RolloutBatch
from tlt_lightning.sharding.units import Sharding, as_forward


@checked("critic.")
@dataclass(frozen=True, kw_only=True)
class CriticConfig:
    """Holds the critic's settings: its trunk and its learning rate.

    Args:
        path: Path or hub name of the model whose trunk the critic starts from; None puts the value head on the
            policy's own trunk, which costs no memory but lets the value loss move the policy's features.
        lora: Train adapters of the critic's own trunk instead of all its weights; needs `path`.
        lr: Learning rate of the critic's parameters; those of the policy keep the optimizer's.
        warmup_iterations: First iterations in which only the critic learns.
    """

    path: str | None = None
    lora: LoRA | None = None
    lr: Positive = 1e-5
    warmup_iterations: CountOrZero = 0

    def __post_init__(self) -> None:
        if self.path is not None:
            object.__setattr__(self, "path", text_of("critic.path", self.path, "Give a folder or hub name."))
        if self.lora is not None and self.path is None:
            raise ValueError("`critic.lora` adapts the critic's own trunk: give `critic.path`, or drop `critic.lora`.")


class Critic(nn.Module):
    """Predicts the return from the state in which each response token was chosen."""

    def __init__(self, config: CriticConfig, hidden_size: int, sharding: Sharding | None = None) -> None:
        super().__init__()
        self.trunk: nn.Module | None = None
        if config.path is not None:
            self.trunk = load_policy(config.path, "critic.path", lora=config.lora, sharding=sharding, needs_head=False)
            hidden_size = causal_lm(self.trunk).config.hidden_size
            output = causal_lm(self.trunk).get_output_embeddings()
            if output.weight is not causal_lm(self.trunk).get_input_embeddings().weight:
                output.requires_grad_(False)  # the vocabulary is not predicted
        self.head = nn.Linear(hidden_size, 1)
        nn.init.zeros_(self.head.weight)  # start from value 0 everywhere: no wrong opinion to unlearn
        nn.init.zeros_(self.head.bias)
        if sharding is not None:
            sharding.shard_small(self)

    def forward(self, batch: RolloutBatch, policy_states: Tensor, index: tuple[Tensor, Tensor]) -> Tensor:
        """Return the values, (B, T) in float32.

        Args:
            batch: The micro-batch.
            policy_states: The policy's hidden states before each response token. (N, H)
            index: Their places in (B, T).
        """
        states = policy_states
        if (trunk := self.trunk) is not None:
            states = as_forward(causal_lm(trunk), lambda: response_states(trunk, batch)[0])
        with torch.autocast(states.device.type, enabled=False):
            values = self.head(states.float()).squeeze(-1)
        return scatter(values, index, batch.rollout_logps)
