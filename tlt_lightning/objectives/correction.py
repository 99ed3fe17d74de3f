"""Weigh tokens for the mismatch between engine and trainer.

The two run different kernels at different precision, so even with equal weights the sampling distribution is not the
trainer's (arXiv 2506.13585; "Your efficient RL framework secretly brings you off-policy RL", Yao et al., 2025). The
weight exp(old_logps - rollout_logps) multiplies the policy loss, never the KL or the value loss. It is a constant.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor

from tlt_lightning.arguments import Bound, Probability, checked
from tlt_lightning.objectives.aggregation import sequence_sum
from tlt_lightning.objectives.kl import log_ratio

Level = Literal["token", "sequence"]


class MismatchCorrection(ABC):
    """Weighs tokens by how likely the trainer finds them against how likely the engine did."""

    level: Level = "token"
    """The unit that has one weight."""

    @abstractmethod
    def __call__(self, old_logps: Tensor, rollout_logps: Tensor, mask: Tensor) -> Tensor:
        """Return the weight of each token's policy loss, (B, T), 0 where masked.

        Args:
            old_logps: The trainer's log-probs before the first update. (B, T)
            rollout_logps: Log-probs of the distribution that was sampled from. (B, T)
            mask: Response tokens. (B, T), bool
        """


def importance_weights(old_logps: Tensor, rollout_logps: Tensor, mask: Tensor, level: Level) -> Tensor:
    """Return trainer probability over engine probability of each token, 0 where masked.

    Arguments are those of `MismatchCorrection`; level "sequence" gives every token the product over its response.
    """
    difference = old_logps - rollout_logps
    if level == "sequence":
        difference = sequence_sum(difference, mask)
    return torch.where(mask, log_ratio(difference, torch.zeros_like(difference)).exp(), 0.0)


def effective_sample_size(metrics: Mapping[str, float]) -> float | None:
    """Return the share of an iteration's tokens that is as good as all of them with their weights (Kish).

    (sum of w)^2 / (n * sum of w^2), from the logged means of w and w^2; None without tokens or correction.
    """
    if not metrics.get("mismatch/ratio_max") or "mismatch/is_weight_square" not in metrics:
        return None
    square = metrics["mismatch/is_weight_square"]
    return metrics["mismatch/is_weight_mean"] ** 2 / square if square else 0.0


@checked()
@dataclass(frozen=True, kw_only=True)
class TruncatedImportance(MismatchCorrection):
    """Cuts weights at an upper bound: less variance for a little bias (TIS).

    Args:
        level: One weight per "token", or per "sequence" (unbiased, but its variance grows with the length).
        max_weight: The bound; small weights are harmless. Usual: tokens 2.0 (slime, SkyRL), sequences 3.0 to 5.0.
    """

    level: Level = "token"
    max_weight: Annotated[float, Bound(1), "1 is the weight of a perfect match."] = 2.0

    def __call__(self, old_logps: Tensor, rollout_logps: Tensor, mask: Tensor) -> Tensor:
        return importance_weights(old_logps, rollout_logps, mask, self.level).clamp(max=self.max_weight)


@checked()
@dataclass(frozen=True, kw_only=True)
class MaskedImportance(MismatchCorrection):
    """Drops tokens or sequences whose weight is out of bounds, keeps the others' (IcePop).

    Args:
        level: Judge each "token", or each "sequence" as a whole.
        keep_above: Lowest weight that is kept.
        keep_below: Highest weight that is kept. 0.5 and 5.0 are IcePop's own bounds.
    """

    level: Level = "token"
    keep_above: Annotated[Probability, "1 is the weight of a perfect match."] = 0.5
    keep_below: Annotated[float, Bound(1), "1 is the weight of a perfect match."] = 5.0

    def __call__(self, old_logps: Tensor, rollout_logps: Tensor, mask: Tensor) -> Tensor:
        weights = importance_weights(old_logps, rollout_logps, mask, self.level)
        return torch.where((weights >= self.keep_above) & (weights <= self.keep_below), weights, 0.0)
