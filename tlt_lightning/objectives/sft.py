"""Imitate texts: supervised fine-tuning."""

from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from tlt_lightning.objectives.advantages import BestOfGroup
from tlt_lightning.objectives.aggregation import token_mean
from tlt_lightning.objectives.base import Advantages, ObjectiveOutput, PolicyObjective, Reduce, fill
from tlt_lightning.rollout import RolloutBatch


@dataclass(kw_only=True)
class SFT(PolicyObjective):
    """Raises the log-probs of given texts: their cross-entropy, in the mean over the tokens of an optimizer step.

    On the rows of a `SupervisedDataModule` all answers are imitated; on rollouts the best of each group, which is
    rejection sampling (RAFT, arXiv 2304.06767).

    Args:
        best: Chooses the rollouts to imitate.
    """

    learns_from_rows: ClassVar[bool] = True
    usual_rates: ClassVar[tuple[float, float]] = 2e-5, 2e-4

    best: BestOfGroup = field(default_factory=BestOfGroup)

    @property
    def min_group_size(self) -> int:
        return self.best.min_group_size

    def advantages(self, batch: RolloutBatch, reduce: Reduce) -> Advantages:
        """Return the weights of the tokens of rollouts, of which those that are imitated are above 0."""
        return self.best(batch, batch.rewards, fill(batch.rollout_logps, batch.response_mask.bool()) * 0, reduce)

    def loss(self, batch: RolloutBatch, logps: Tensor, entropy: Tensor, values: Tensor | None) -> ObjectiveOutput:
        """Return the weighted cross-entropy of one micro-batch; rows weigh 1."""
        mask = batch.response_mask.bool()
        losses = -fill(logps, mask)
        if batch.advantages is not None:
            losses = losses * batch.advantages
        return ObjectiveOutput(token_mean(losses, batch), {"train/entropy": token_mean(entropy, batch).detach()})
