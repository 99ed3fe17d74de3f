"""Define an objective: advantages from rollouts, a loss from advantages."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from tlt_lightning.objectives.divergence import Divergence
from tlt_lightning.rollout import RolloutBatch

Reduce = Callable[[Tensor], Tensor]
"""Sums a tensor over all ranks; the identity on one."""

Advantages = tuple[Tensor, Tensor | None]
"""Advantages and, with a critic, its targets; (B, T) each and 0 where masked."""


@dataclass(slots=True)
class ObjectiveOutput:
    """Holds a loss and the metrics to log beside it.

    Args:
        loss: Scalar to call `backward` on.
        metrics: Detached scalars under their full names (`train/kl`, `mismatch/...`). Each is already normalised like
            the loss, so that the sum over an optimizer step's micro-batches, averaged over ranks, is its value; a
            micro-batch that leaves one out contributes 0 to it. Of a name that ends in `_max` the largest is logged.
    """

    loss: Tensor
    metrics: dict[str, Tensor] = field(default_factory=dict)


class PolicyObjective(ABC):
    """Turns a scored batch into advantages, then into a loss.

    Pure: no Trainer, no model, float32 (or float64 if given float64). Subclasses are dataclasses whose fields are
    their settings, so that a recipe sets them under `init_args`.
    """

    needs_critic: ClassVar[bool] = False
    """True if `advantages` reads `batch.values` and `loss` is given `values`."""

    divergence: Divergence | None = None
    """Fills in `batch.divergence` in the update's own pass, with gradient; its teacher is the reference network."""

    learns_from_rows: ClassVar[bool] = False
    """True if `loss` does without advantages, and so learns from given texts, which have no rewards."""

    usual_rates: ClassVar[tuple[float, float]] = 1e-6, 1e-5
    """Learning rates where nobody has given one: of all weights, and of adapters."""

    @property
    def needs_reference(self) -> bool:
        """True if `batch.ref_logps` must be filled in, which costs a frozen copy of the policy."""
        return False

    @property
    def uses_reference(self) -> bool:
        """True if a frozen model runs beside the policy: for `batch.ref_logps`, or as the teacher."""
        return self.needs_reference or self.divergence is not None

    @property
    def needs_rewards(self) -> bool:
        """True if it learns from rewards; a run of an objective that does not may have none."""
        return True

    @property
    def needs_old_logps(self) -> bool:
        """True if `advantages` reads `batch.old_logps`, which costs a pass before the update.

        `loss` always finds them: where an iteration takes a single optimizer step they are its own log-probs.
        """
        return False

    @property
    def min_group_size(self) -> int:
        """Fewest responses per prompt for which the advantages mean something."""
        return 1

    @property
    def stop_at_kl(self) -> float | None:
        """Value of `train/approx_kl` at which an iteration's updates stop; None never stops."""
        return None

    @property
    def needs_entropy_grad(self) -> bool:
        """True if the entropy is part of the loss and so needs a gradient."""
        return False

    @property
    def learns_off_policy(self) -> bool:
        """True if it makes up for tokens that older weights wrote, or needs not to."""
        return True

    def clips_behaviour(self, *, asynchronous: bool) -> bool:
        """Return True if `loss` takes its ratio to the policy that wrote the text: it needs no earlier log-probs.

        `asynchronous` is the batch's, whose `old_logps` are then the loss's own where nothing else asks for them.
        """
        return False

    @property
    def length_limits(self) -> dict[str, int]:
        """Settings, by name, that have to be the longest response the engine may write."""
        return {}

    @abstractmethod
    def advantages(self, batch: RolloutBatch, reduce: Reduce) -> Advantages:
        """Return the advantages and, with a critic, its targets for a rank's whole iteration.

        Args:
            batch: All sequences of this rank; whole groups, log-probs and values filled in.
            reduce: Sums over ranks, for statistics of the whole iteration.
        """

    @abstractmethod
    def loss(self, batch: RolloutBatch, logps: Tensor, entropy: Tensor, values: Tensor | None) -> ObjectiveOutput:
        """Return the loss of one micro-batch.

        Args:
            batch: The micro-batch, advantages filled in.
            logps: Log-probs of the response tokens under the policy being trained. (B, T), with gradient
            entropy: Entropy of its next-token distribution. (B, T)
            values: The critic's predictions. (B, T), with gradient; None without a critic
        """


def upcast(x: Tensor) -> Tensor:
    """Return `x` in float32, or in float64 if it is that: no half precision in the loss."""
    return x if x.dtype == torch.float64 else x.float()


def fill(x: Tensor, mask: Tensor) -> Tensor:
    """Return `x` upcast, with 0 where `mask` is False.

    Unlike multiplying by zero, this keeps infinities and NaN in padding out of the loss and its gradient.
    """
    return torch.where(mask, upcast(x), 0.0)


def require(x: Tensor | None, name: str, reason: str) -> Tensor:
    """Return `x`; raise ValueError that names the missing field of the batch if it is None."""
    if x is None:
        raise ValueError(f"`batch.{name}` is None but {reason}; fill it in before calling the objective.")
    return x
