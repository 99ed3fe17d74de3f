"""Train with a critic: PPO.

Differences from the paper (arXiv 1707.06347):
- The value loss is clipped like verl's and OpenAI's code, not the paper's text, and is always a mean over tokens.
- The clip is asymmetric and the mismatch correction is on, as everywhere here.
"""

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from tlt_lightning.arguments import Positive
from tlt_lightning.objectives.advantages import GAE, AdvantageEstimator, global_moments
from tlt_lightning.objectives.aggregation import token_mean
from tlt_lightning.objectives.base import ObjectiveOutput, Reduce, fill, require
from tlt_lightning.objectives.composed import ComposedObjective
from tlt_lightning.rollout import RolloutBatch


def clipped_value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float | None) -> Tensor:
    """Return half the squared error of clipped or unclipped predictions, (B, T) each.

    The worse of the two counts: a prediction gains no further than `clip` from `old_values`, those before the update.
    """
    error = (values - returns).square()
    if clip is not None:
        clipped = old_values + (values - old_values).clamp(-clip, clip)
        error = torch.maximum(error, (clipped - returns).square())
    return error / 2


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor, reduce: Reduce) -> Tensor:
    """Return the share of the returns that the critic foresaw.

    1 is all of it, 0 no more than their mean or nothing to foresee, negative worse. Call it on a rank's whole
    iteration, (B, T) each: the ratio of two variances cannot be averaged over micro-batches.
    """
    mask = mask.bool()
    _, total = global_moments(returns, mask, reduce)
    _, unexplained = global_moments(returns - values, mask, reduce)
    # Equal returns, of rewards that are all the same, differ by the rounding of the values they are added up from.
    return torch.where(total > 1e-9 * unexplained, 1 - unexplained / total, 0.0)


@dataclass(kw_only=True)
class PPO(ComposedObjective):
    """Lets a critic judge every token: proximal policy optimization (arXiv 1707.06347).

        d_t = R_t + gamma V_{t+1} - V_t                               R_t is the reward at the last token, else 0
        A_t = sum_{s >= t} (gamma lam)^(s - t) d_s                    G_t = A_t + V_t; then A is whitened
        L = -1/N sum_it w_it min(r_it A_t, clip(r_it, 0.8, 1.28) A_t)
            + value_coef 1/N sum_it max((v - G)^2, (V + clip(v - V, +-value_clip) - G)^2) / 2

    V is the critic before the update, v the one that is trained.

    Args:
        advantage: GAE; set its `gamma` and `lam`.
        value_coef: Weight of the value loss, half a squared error; matters where a trunk or gradient norm is shared.
        value_clip: How far a prediction may move from the one before the update, in units of reward; null is off.
        target_kl: Stop this iteration's updates once `train/approx_kl` exceeds it; null never stops.
    """

    needs_critic: ClassVar[bool] = True

    advantage: AdvantageEstimator = field(default_factory=GAE)
    value_coef: Positive = 1.0
    value_clip: Positive | None = 0.2
    target_kl: Positive | None = None

    @property
    def stop_at_kl(self) -> float | None:
        return self.target_kl

    def loss(self, batch: RolloutBatch, logps: Tensor, entropy: Tensor, values: Tensor | None) -> ObjectiveOutput:
        """Return the policy's loss plus the critic's."""
        if values is None:
            raise ValueError("`values` is None but PPO trains a critic; give the policy a value head.")
        mask = batch.response_mask.bool()
        old_values = require(batch.values, "values", "the value loss is clipped around them")
        returns = require(batch.returns, "returns", "they are the critic's targets")
        output = super().loss(batch, logps, entropy, values)
        value_loss = token_mean(clipped_value_loss(fill(values, mask), old_values, returns, self.value_clip), batch)
        loss = output.loss + self.value_coef * value_loss
        return ObjectiveOutput(loss, output.metrics | {"train/value_loss": value_loss.detach()})
