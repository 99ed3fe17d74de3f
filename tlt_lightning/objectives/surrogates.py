"""Compute policy losses per token, which bound how far one batch may move the policy.

Differences from the sources, where verl and TRL disagree:
- Dual clip: verl always applies it (c = 3), TRL never; here it is off unless `dual_clip` is set, as in GRPO and DAPO.
- CISPO's lower bound: verl has one, TRL none; `CappedRatio.min_ratio` covers both, 0 (none) by default, as in ScaleRL.
- All log-ratios are clamped to +-20 (`kl.MAX_LOG_RATIO`), GSPO's mean too (verl: at +10); TRL overflows unclamped.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from tlt_lightning.arguments import Bound, Positive, Probability, checked
from tlt_lightning.objectives.aggregation import sequence_mean
from tlt_lightning.objectives.kl import log_ratio

ClipLow = Annotated[Probability, "The ratio is kept above 1 minus it."]
ClipHigh = Annotated[float, Bound(0), "The ratio is kept below 1 plus it."]


def _clipped(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> tuple[Tensor, Tensor]:
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    return torch.maximum(unclipped, clipped), clipped > unclipped


class Surrogate(ABC):
    """Computes the policy loss of each token from its advantage."""

    has_ratio: ClassVar[bool] = True
    """True if the loss holds the ratio to `old_logps`, which then weighs tokens by who wrote them."""

    @abstractmethod
    def __call__(self, logps: Tensor, old_logps: Tensor, advantages: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss of each token and where the clip cut in (bool), (B, T) each.

        Args:
            logps: Log-probs under the policy being trained, 0 where masked. (B, T), with gradient
            old_logps: Log-probs under the proximal policy, 0 where masked. (B, T)
            advantages: Zero where masked. (B, T)
            mask: Response tokens. (B, T), bool
        """


@checked()
@dataclass(frozen=True, kw_only=True)
class ClippedRatio(Surrogate):
    """Clips PPO's ratio (arXiv 1707.06347, Eq. 7) at two bounds, with a dual clip.

    Args:
        clip_low: The ratio gains nothing below 1 - this.
        clip_high: The ratio gains nothing above 1 + this; DAPO's higher 0.28 lets unlikely tokens grow.
        dual_clip: Loss bound at negative advantages, in |advantage| (arXiv 1912.09729, Eq. 5); None is off, verl: 3.
    """

    clip_low: ClipLow = 0.2
    clip_high: ClipHigh = 0.28
    dual_clip: Annotated[float, Bound(1, excludes=(1,)), "None switches it off."] | None = None

    def __call__(self, logps: Tensor, old_logps: Tensor, advantages: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return max(-A r, -A clip(r)), at most -A `dual_clip` where A < 0."""
        loss, clipped = _clipped(log_ratio(logps, old_logps).exp(), advantages, self.clip_low, self.clip_high)
        if self.dual_clip is not None:
            bound = -advantages * self.dual_clip
            cut = (advantages < 0) & (loss > bound)
            loss, clipped = torch.where(cut, bound, loss), clipped | cut
        return loss, clipped


@checked()
@dataclass(frozen=True, kw_only=True)
class SequenceRatio(Surrogate):
    """Clips one ratio per response, its tokens' geometric mean: GSPO (arXiv 2507.18071).

    Each token carries the sequence's ratio with its own gradient (GSPO-token), as in verl; averaged per sequence that
    is GSPO itself. With token-level mismatch weights each gradient then carries its token's weight, in TRL the mean.

    Args:
        sequence_clip_low: The ratio gains nothing below 1 - this; bounds are small because a mean moves little.
        sequence_clip_high: It gains nothing above 1 + this.
    """

    sequence_clip_low: ClipLow = 3e-4
    sequence_clip_high: ClipHigh = 4e-4

    def __call__(self, logps: Tensor, old_logps: Tensor, advantages: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return max(-A s, -A clip(s)) with the sequence's ratio s."""
        mean_difference = sequence_mean(logps - old_logps, mask).detach()
        ratio = log_ratio(logps - logps.detach(), -mean_difference).exp()
        return _clipped(ratio, advantages, self.sequence_clip_low, self.sequence_clip_high)


@checked()
@dataclass(frozen=True, kw_only=True)
class CappedRatio(Surrogate):
    """Weighs by a bounded ratio, so that no token loses its gradient: CISPO (arXiv 2506.13585).

    Args:
        max_ratio: Upper bound of the weight (5.0 in ScaleRL, SkyRL and AReaL).
        min_ratio: Lower bound; 0 is none.
    """

    max_ratio: Annotated[float, Bound(1)] = 5.0
    min_ratio: Probability = 0.0

    def __call__(self, logps: Tensor, old_logps: Tensor, advantages: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return -A clip(r) log p, without a gradient through r."""
        ratio = log_ratio(logps, old_logps).exp().detach()
        weight = ratio.clamp(self.min_ratio, self.max_ratio)
        return -weight * advantages * logps, weight != ratio


@checked()
@dataclass(frozen=True, kw_only=True)
class SoftGate(Surrogate):
    """Fades the gradient out by a sigmoid of the ratio, uncut: SAPO (arXiv 2511.20347).

    Args:
        temperature_positive: Steepness of the gate for positive advantages.
        temperature_negative: Steepness otherwise; higher, because pushing tokens down is less stable.
    """

    temperature_positive: Positive = 1.0
    temperature_negative: Positive = 1.05

    def __call__(self, logps: Tensor, old_logps: Tensor, advantages: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return -A sigmoid(t (r - 1)) 4 / t."""
        ratio = log_ratio(logps, old_logps).exp()
        positive = torch.full_like(ratio, self.temperature_positive)
        temperature = torch.where(advantages > 0, positive, self.temperature_negative)
        gate = torch.sigmoid(temperature * (ratio - 1)) * 4 / temperature
        return -advantages * gate, torch.zeros_like(mask)


@dataclass(frozen=True)
class PlainPolicyGradient(Surrogate):
    """Multiplies log-prob and advantage without bound: REINFORCE, for one update per rollout."""

    has_ratio: ClassVar[bool] = False

    def __call__(self, logps: Tensor, old_logps: Tensor, advantages: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return -A log p."""
        return -advantages * logps, torch.zeros_like(mask)
