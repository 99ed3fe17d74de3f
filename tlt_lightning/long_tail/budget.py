"""Set how many of an iteration's tokens a drafter is trained on."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

from typing_extensions import override

from tlt_lightning.arguments import Count, NotNegative, checked
from tlt_lightning.long_tail.publication import Publication


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredIteration:
    """Says what an iteration took and trained, over all workers; seconds are means over them.

    Args:
        seconds: The whole iteration.
        decode_seconds: Rollout, until the last worker was done.
        cost: Seconds that the drafter took outside idle windows.
        training_seconds: Those of them that went into training steps.
        share: Tokens trained on outside idle windows, as a share of the iteration's.
        idle_share: The same inside idle windows.
        learned_share: Share of the decode seconds in which the head drafted; None while it is cold.
        acceptance: Tokens per request and engine step.
    """

    seconds: float
    decode_seconds: float
    cost: float
    training_seconds: float
    share: float
    idle_share: float = 0.0
    learned_share: float | None = None
    acceptance: float = 1.0


class TrainingBudget(ABC):
    """Decides on the tokens of training in each iteration; workers that see the same numbers decide the same."""

    @property
    def is_empty(self) -> bool:
        """True if nothing is ever trained outside idle windows."""
        return False

    @abstractmethod
    def decide(self, iteration: int, remaining: int | None) -> float | None:
        """Return the share of an iteration's tokens to train on; called once in each.

        Idle windows come first: what was trained in them is taken off. 0 trains in idle windows alone, None not at all.

        Args:
            iteration: Number of the iteration, from 0.
            remaining: Iterations after this one; None if the run has no known end.
        """

    def limit(self, elapsed: float) -> float:
        """Return the most seconds of training outside idle windows, `elapsed` seconds into the iteration."""
        return inf

    def note_publication(self, publication: Publication) -> None:  # noqa: B027 - a fixed one learns nothing
        """Learn from a decision about publishing, before `decide` of the same iteration."""

    def note_iteration(self, iteration: MeasuredIteration) -> None:  # noqa: B027 - likewise
        """Learn from an iteration that is over."""

    def metrics(self) -> dict[str, float]:
        """Return numbers behind the last decision, under the loggers' names."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs, as primitives."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # noqa: B027 - likewise
        """Go on from what `state_dict` saved."""


class FixedBudget(TrainingBudget):
    """Trains on the same share of every n-th iteration's tokens, whatever that costs or gains.

    Runs with it are reproducible bit by bit, which those with `AdaptiveBudget` are not: its choices depend on clocks.

    Args:
        share: Share of the iteration's tokens; above 1 sees them several times. 0 trains in idle windows alone,
            and never with a single worker.
        every_n_iterations: Train in every n-th iteration only.
    """

    @checked()
    def __init__(self, share: NotNegative = 0.1, every_n_iterations: Count = 1) -> None:
        self.share = share
        self.every_n_iterations = every_n_iterations

    @property
    @override
    def is_empty(self) -> bool:
        return self.share == 0

    @override
    def decide(self, iteration: int, remaining: int | None) -> float | None:
        return self.share if (iteration + 1) % self.every_n_iterations == 0 else None
