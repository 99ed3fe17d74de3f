"""Learn from a teacher on the policy's own responses, beside a reward or without one.

Differences from TRL 1.16's `DistillationTrainer`, whose loss is this one's default:
- `beta` is also TRL's; `top_k` counts the teacher's other tokens as one more, so that it stays a divergence.
- Rewards may join in; tokens that older weights wrote count as any others, as in TRL.
"""

from dataclasses import dataclass, field

from torch import Tensor

from tlt_lightning.arguments import NotNegative
from tlt_lightning.objectives.aggregation import token_mean
from tlt_lightning.objectives.base import Advantages, ObjectiveOutput, Reduce, require
from tlt_lightning.objectives.composed import ComposedObjective
from tlt_lightning.objectives.divergence import Divergence
from tlt_lightning.rollout import RolloutBatch


@dataclass(kw_only=True)
class Distillation(ComposedObjective):
    """Follows a teacher on its own responses: on-policy distillation (GKD, arXiv 2306.13649).

        L = 1/N sum_it D(policy, teacher)_it + reward_coef L_GRPO

    The teacher is `model.reference`. Without `divergence` it is heard of the sampled token alone, by `loss_kl`: K2 has
    the reverse KL's gradient, K3 the forward KL's, K1 none.

    Args:
        divergence: How far the policy is from the teacher; null leaves it to `loss_kl`.
        reward_coef: Weight of the loss that the rewards make, everything else of which is GRPO's; 0 needs no rewards.
    """

    divergence: Divergence | None = field(default_factory=Divergence)
    reward_coef: NotNegative = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.divergence is None and self.loss_kl is None:
            raise ValueError(
                "`divergence` and `loss_kl` are both None, and Distillation would not hear its teacher: give one of "
                "them, or take GRPO."
            )

    @property
    def needs_rewards(self) -> bool:
        return self.reward_coef > 0

    @property
    def min_group_size(self) -> int:
        return super().min_group_size if self.needs_rewards else 1

    @property
    def learns_off_policy(self) -> bool:
        """True if no reward is learned from, or a correction weighs its tokens by their age."""
        return super().learns_off_policy or not self.needs_rewards

    def advantages(self, batch: RolloutBatch, reduce: Reduce) -> Advantages:
        """Return the advantages times `reward_coef`, with which every surrogate grows alike."""
        advantages, targets = super().advantages(batch, reduce)
        return self.reward_coef * advantages, targets

    def loss(self, batch: RolloutBatch, logps: Tensor, entropy: Tensor, values: Tensor | None) -> ObjectiveOutput:
        """Return the divergence's loss plus what rewards and `loss_kl` add."""
        output = super().loss(batch, logps, entropy, values)
        if self.divergence is None:
            return output
        divergence = require(batch.divergence, "divergence", "the policy learns from its teacher by it")
        loss = output.loss + self.aggregation(divergence, batch)
        return ObjectiveOutput(loss, output.metrics | {"train/divergence": token_mean(divergence, batch).detach()})
