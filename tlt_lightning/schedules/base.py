"""Define a schedule: what a rollout starts, when it has enough, what waits. Pure: neither Trainer nor engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

from typing_extensions import override

from tlt_lightning.rollout import Response


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingGroup:
    """Holds a prompt that was drawn and that no update has learned from.

    Args:
        prompt: Its number among the training prompts.
        draw: Number of the draw since the start of the run, over all ranks.
        drawn_in: Iteration of the draw.
        begun_in: Iteration in which the oldest of `responses` was begun.
        deferrals: Times the group was deferred.
        responses: Its responses, ended or not; empty if nothing is kept of them.
        expected_tokens: Mean length of the answers that the prompt had before the draw, 0 if it had none.
    """

    prompt: int
    draw: int
    drawn_in: int
    begun_in: int
    deferrals: int = 0
    responses: tuple[Response, ...] = ()
    expected_tokens: float = 0.0

    @property
    def num_tokens(self) -> int:
        """Tokens of all its responses."""
        return sum(len(response.token_ids) for response in self.responses)

    @property
    def num_unfinished_tokens(self) -> int:
        """Tokens of its responses that go on, which the next weights read again."""
        return sum(len(response.token_ids) for response in self.responses if response.is_unfinished)

    def without_responses(self, iteration: int) -> PendingGroup:
        """Return the group with nothing written of it, begun in this iteration."""
        return replace(self, begun_in=iteration, responses=())


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutDemand:
    """Says what a rollout has to bring on this rank.

    Args:
        wanted: Groups to learn from, at least 1.
        iteration: Number of the policy iteration.
        is_first: False for the further rollouts of an iteration, by which dynamic sampling replaces groups.
        least_deferred: Groups that wait on the rank with the fewest, by which all decide alike; None is as many as on
            this one. Numbers differ where a resumed run has dealt out what waited, or with dynamic sampling.
    """

    wanted: int
    iteration: int
    is_first: bool = True
    least_deferred: int | None = None


class RolloutSchedule(ABC):
    """Decides what a rollout starts and when it has enough, each rank for itself.

    A schedule that lets responses wait because they turn out long, and writes them anew, learns too little from long
    ones. What waits has to hang on what is known before the text, or to keep what was written.
    """

    defers: bool = True
    """True if prompts may wait for a later rollout."""

    stops: bool = True
    """True if rollouts may end with requests unfinished, which the engine must be able to stop."""

    continues: bool = True
    """True if what older weights wrote of a group may be gone on with; without a correction that is refused."""

    is_asynchronous: bool = False
    """True if requests run on while the policy learns, in engines that can. Texts are older than the policy as a rule,
    and objectives clip against the policy that wrote them."""

    @abstractmethod
    def begin(self, demand: RolloutDemand, deferred: Sequence[PendingGroup]) -> tuple[list[PendingGroup], int]:
        """Return the groups that the rollout takes up of those deferred, and how many it draws besides."""

    def start(self, demand: RolloutDemand, groups: Sequence[PendingGroup]) -> Sequence[int]:
        """Return the places of the groups that are written, of those taken up and drawn; the others are deferred."""
        return range(len(groups))

    @abstractmethod
    def choose(
        self, demand: RolloutDemand, groups: Sequence[PendingGroup], complete: Sequence[int]
    ) -> Sequence[int] | None:
        """Return the places of the groups to learn from, or None to write on; what is left is deferred.

        Args:
            demand: That of `begin`.
            groups: All groups that are written, as they were when the rollout began.
            complete: Places of those whose responses have all ended, in the order in which they did.
        """


class SynchronousSchedule(RolloutSchedule):
    """Starts the groups of an iteration and waits for the last of their responses.

    On-policy. Groups that another schedule of the resumed run has deferred come first, and are written anew.
    """

    defers: bool = False
    stops: bool = False
    continues: bool = False

    @override
    def begin(self, demand: RolloutDemand, deferred: Sequence[PendingGroup]) -> tuple[list[PendingGroup], int]:
        groups = [group.without_responses(demand.iteration) for group in deferred[: demand.wanted]]
        return groups, demand.wanted - len(groups)

    @override
    def choose(
        self, demand: RolloutDemand, groups: Sequence[PendingGroup], complete: Sequence[int]
    ) -> Sequence[int] | None:
        return range(len(groups)) if len(complete) == len(groups) else None
