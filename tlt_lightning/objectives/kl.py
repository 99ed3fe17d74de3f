"""Estimate KL(policy || reference) from sampled tokens (Schulman), and penalise it.

With d = log policy - log reference of a token sampled from the policy. All return (B, T), before any aggregation.

An estimator of a KL, taken as a loss, need not descend that KL. In expectation over the policy's tokens the gradient of
K1 is 0, that of K2 the gradient of KL(policy || reference), and that of K3 the gradient of KL(reference || policy):
E[(1 - e^-d) grad log p] = - sum over tokens of reference * grad log p.

Differences from the sources:
- d is clamped to +-20 for k3; verl also clamps k3 to +-10, which leaves no gradient just where it is needed.
- TRL multiplies k3 by the importance ratio by default (`use_bias_correction_kl`); verl, OpenRLHF and we do not.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Annotated

from torch import Tensor

from tlt_lightning.arguments import Positive, checked

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to plus and minus this before `exp` (verl's bound): e^20 is 4.9e8, far beyond every clip
range, and sums of it stay finite in float32. A clamped token has no gradient."""


def log_ratio(logps: Tensor, old_logps: Tensor) -> Tensor:
    """Return log(new / old) clamped to `MAX_LOG_RATIO` on both sides."""
    return (logps - old_logps).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def k3(logps: Tensor, ref_logps: Tensor) -> Tensor:
    """Return e^-d - 1 + d, as for every KL that is logged: unbiased, never negative."""
    d = log_ratio(logps, ref_logps)
    return (-d).exp() - 1 + d


class KLEstimator(ABC):
    """Estimates the KL from the policy to the reference at each token."""

    @abstractmethod
    def __call__(self, logps: Tensor, ref_logps: Tensor) -> Tensor:
        """Return the estimate for each token, (B, T).

        Args:
            logps: Log-probs under the policy. (B, T)
            ref_logps: Log-probs of the same tokens under the reference. (B, T)
        """


@dataclass(frozen=True)
class K1(KLEstimator):
    """Estimates the KL by the log-ratio d: unbiased, noisy, of either sign; usual in the reward.

    As a loss its gradient is zero in expectation and so does not hold the policy; use K2 or K3 there.
    """

    def __call__(self, logps: Tensor, ref_logps: Tensor) -> Tensor:
        return logps - ref_logps


@dataclass(frozen=True)
class K2(KLEstimator):
    """Estimates the KL by d^2 / 2: biased, low variance; as a loss it descends this very KL (reverse)."""

    def __call__(self, logps: Tensor, ref_logps: Tensor) -> Tensor:
        return (logps - ref_logps).square() / 2


@dataclass(frozen=True)
class K3(KLEstimator):
    """Estimates the KL by e^-d - 1 + d: unbiased, low variance; GRPO's and the loss's usual one.

    As a loss it descends the forward KL, from the reference to the policy: text that the reference finds likely and the
    policy does not is pulled up. Near the reference the two KLs are alike.
    """

    def __call__(self, logps: Tensor, ref_logps: Tensor) -> Tensor:
        return k3(logps, ref_logps)


@checked()
@dataclass(frozen=True, kw_only=True)
class KLPenalty:
    """Holds the policy near the reference, which costs a frozen copy and one pass with it.

    Args:
        coef: Weight of the penalty. The field uses 0.001 (verl, prime-rl) to 0.05 (TRL's RLOO).
        estimator: How the KL is estimated from the sampled tokens.
    """

    coef: Annotated[Positive, "Leave the KL penalty out instead."] = 0.001
    estimator: KLEstimator = field(default_factory=K3)

    def __call__(self, logps: Tensor, ref_logps: Tensor) -> Tensor:
        """Return the weighted penalty of each token, (B, T)."""
        return self.coef * self.estimator(logps, ref_logps)
