"""Name the proximal policy, near which an update stays.

An objective is decoupled (arXiv 2110.00641, Eq. 3; AReaL, arXiv 2505.24298, Eq. 5): the ratio is the policy's to the
proximal one, where it is clipped, and the correction is the proximal policy's to the behaviour policy, which wrote.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor


class ProximalPolicy(ABC):
    """Says to which policy the ratio is taken."""

    @abstractmethod
    def __call__(self, old_logps: Tensor, rollout_logps: Tensor) -> Tensor:
        """Return the proximal policy's log-prob of each token, (B, T).

        Args:
            old_logps: The trainer's log-probs before the first update. (B, T)
            rollout_logps: Log-probs of the distribution that was sampled from. (B, T)
        """


@dataclass(frozen=True)
class OldPolicy(ProximalPolicy):
    """Clips against the policy before the iteration's first update, and corrects from the text to it.

    With one optimizer step per iteration that is the policy itself: nothing is clipped, however old the text.
    """

    def __call__(self, old_logps: Tensor, rollout_logps: Tensor) -> Tensor:
        return old_logps


@dataclass(frozen=True)
class BehaviourPolicy(ProximalPolicy):
    """Clips against the policy that wrote each token, whose age the ratio then holds: the correction is 1.

    Bounds how far the policy moves from its text in all updates since, and needs no pass before them.
    """

    def __call__(self, old_logps: Tensor, rollout_logps: Tensor) -> Tensor:
        return rollout_logps
