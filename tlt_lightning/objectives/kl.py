"""How far the policy is from the reference: Schulman's estimators of KL(policy || reference) from sampled tokens.

With d = log policy - log reference of a token sampled from the policy. All return (B, T), before any aggregation.

Differences from the sources:
- d is clamped to +-20 for k3; verl also clamps k3 itself to +-10, which we do not, because a bounded penalty has no
  gradient just where it is needed.
- TRL multiplies k3 by the importance ratio by default (`use_bias_correction_kl`); verl, OpenRLHF and we do not.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

from torch import Tensor

from tlt_lightning.objectives.numerics import log_ratio


def k1(logps: Tensor, ref_logps: Tensor) -> Tensor:
    """Return d: unbiased, noisy, of either sign."""
    return logps - ref_logps


def k2(logps: Tensor, ref_logps: Tensor) -> Tensor:
    """Return d^2 / 2: biased, low variance; its gradient is the unbiased gradient of the KL on-policy."""
    return (logps - ref_logps).square() / 2


def k3(logps: Tensor, ref_logps: Tensor) -> Tensor:
    """Return e^-d - 1 + d: unbiased, never negative."""
    d = log_ratio(logps, ref_logps)
    return (-d).exp() - 1 + d


def straight_through(value: Tensor, gradient: Tensor) -> Tensor:
    """Return a tensor with the value of `value` and the gradient of `gradient`."""
    return gradient + (value - gradient).detach()


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
    """The plain log-ratio: the usual choice in the reward.

    In the loss its gradient is zero in expectation and so does not hold the policy; use K2 or K3 there.
    """

    def __call__(self, logps: Tensor, ref_logps: Tensor) -> Tensor:
        """Return d."""
        return k1(logps, ref_logps)


@dataclass(frozen=True)
class K2(KLEstimator):
    """Half the squared log-ratio."""

    def __call__(self, logps: Tensor, ref_logps: Tensor) -> Tensor:
        """Return d^2 / 2."""
        return k2(logps, ref_logps)


@dataclass(frozen=True)
class K3(KLEstimator):
    """The low-variance unbiased estimator of GRPO: the usual choice in the loss."""

    def __call__(self, logps: Tensor, ref_logps: Tensor) -> Tensor:
        """Return e^-d - 1 + d."""
        return k3(logps, ref_logps)


@dataclass(frozen=True, kw_only=True)
class StraightThrough(KLEstimator):
    """Reports one estimator and descends K2, whose gradient is that of the KL itself.

    Args:
        value: The estimator whose value is reported.
    """

    value: KLEstimator = field(default_factory=K3)

    def __call__(self, logps: Tensor, ref_logps: Tensor) -> Tensor:
        """Return the value of one estimator with the gradient of K2."""
        return straight_through(self.value(logps, ref_logps), k2(logps, ref_logps))


@dataclass(frozen=True, kw_only=True)
class KLPenalty:
    """Holds the policy near the reference; costs a frozen copy of the policy and one forward pass with it.

    Args:
        coef: Weight of the penalty. The field uses 0.001 (verl, prime-rl) to 0.05 (TRL's RLOO).
        estimator: How the KL is estimated from the sampled tokens.

    Example:
        >>> KLPenalty(coef=0.01, estimator=K1())
        KLPenalty(coef=0.01, estimator=K1())
    """

    coef: float = 0.001
    estimator: KLEstimator = field(default_factory=K3)

    def __post_init__(self) -> None:
        if self.coef <= 0:
            raise ValueError(
                f"`coef` of a KL penalty must be positive, got {self.coef}; leave the penalty out instead."
            )

    def __call__(self, logps: Tensor, ref_logps: Tensor) -> Tensor:
        """Return the weighted penalty of each token, (B, T)."""
        return self.coef * self.estimator(logps, ref_logps)
