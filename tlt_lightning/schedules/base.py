"""Define a schedule: what a rollout starts, when it has enough, what waits. Pure: neither Trainer nor engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from tlt_lightning.rollout import Response


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenGroup:
    """Holds a prompt that was drawn and that no update has learned from.

    Args:
        prompt: Its number among the training prompts.
        draw: Number of the draw since the start of the run, over all ranks.
        drawn: Iteration of the draw.
        begun: Iteration in which the oldest of `responses` was begun.
        deferrals: Times the group was put aside.
        responses: Its responses, ended or not; empty if nothing is kept of them.
        expected_tokens: Mean length of the answers that the prompt had before the draw, 0 if it had none.
    """

    prompt: int
    draw: int
    drawn: int
    begun: int
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

    def anew(self, iteration: int) -> OpenGroup:
        """Return the group with nothing written of it, begun in this iteration."""
        return replace(self, begun=iteration, responses=())


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """Says what a rollout has to bring on this rank.

    Args:
        wanted: Groups to learn from, at least 1.
        iteration: Number of the policy iteration.
        is_first: False for the further rollouts of an iteration, by which dynamic sampling replaces groups.
        least_aside: Groups put aside on the rank that has the fewest, by which all decide alike; None is as many as on
            this one. Numbers differ where a resumed run has dealt out what waited, or with dynamic sampling.
    """

    wanted: int
    iteration: int
    is_first: bool = True
    least_aside: int | None = None


class RolloutSchedule(ABC):
    """Decides what a rollout starts and when it has enough, each rank for itself."""

    stops: ClassVar[bool] = True
    """True if rollouts may end with requests unfinished, which the engine must be able to stop."""

    has_own_noise: ClassVar[bool] = False
    """True if a group that is written anew gets the random numbers that it had."""

    continues: ClassVar[bool] = True
    """True if what older weights wrote of a group may be gone on with; without a correction that is refused."""

    @abstractmethod
    def begin(self, demand: Demand, aside: Sequence[OpenGroup]) -> tuple[list[OpenGroup], int]:
        """Return the groups that the rollout takes up of those put aside, and how many it draws besides."""

    @abstractmethod
    def choose(self, demand: Demand, groups: Sequence[OpenGroup], complete: Sequence[int]) -> list[int] | None:
        """Return the places of the groups to learn from, or None to write on; what is left is put aside.

        Args:
            demand: That of `begin`.
            groups: All groups of the rollout, as they were when it began.
            complete: Places of those whose responses have all ended, in the order in which they did.
        """


def begin_of(schedule: RolloutSchedule, demand: Demand, aside: Sequence[OpenGroup] = ()) -> tuple[list[OpenGroup], int]:
    """Return what `schedule.begin` does; raise TypeError or ValueError unless that is as it says."""
    begun, name = schedule.begin(demand, tuple(aside)), f"`{type(schedule).__name__}.begin`"
    if not isinstance(begun, tuple) or len(begun) != 2 or not isinstance(begun[1], Integral):
        raise TypeError(
            f"{name} has to return a pair, the groups that it takes up and how many it draws besides (a whole number), "
            f"got {begun!r:.200}."
        )
    groups, num_fresh = list(begun[0]), int(begun[1])
    draws = [group.draw for group in groups if isinstance(group, OpenGroup)]
    if len({*draws}) < len(groups) or not {*draws} <= {group.draw for group in aside}:
        raise ValueError(f"{name} has to take up groups out of `aside`, each once, got {groups!r:.200}.")
    if num_fresh < 0 or len(groups) + num_fresh < demand.wanted:
        raise ValueError(
            f"{name} takes up {len(groups)} groups and draws {num_fresh}, and the rollout has to bring {demand.wanted} "
            "(`demand.wanted`): return at least as many in all."
        )
    if not schedule.continues and any(group.responses for group in groups):
        raise ValueError(
            f"{name} goes on with what older weights wrote, and its `continues` is False: take up "
            "`group.anew(demand.iteration)`, or leave `continues` True."
        )
    return groups, num_fresh


def choice_of(
    schedule: RolloutSchedule, demand: Demand, groups: Sequence[OpenGroup], complete: Sequence[int]
) -> list[int] | None:
    """Return what `schedule.choose` does; raise ValueError unless that is as many complete groups as are wanted."""
    chosen: Any = schedule.choose(demand, groups, complete)
    if chosen is None:
        return None
    known = {*complete}  # a validation may have fifty thousand
    is_known = isinstance(chosen, Collection) and all(
        place in (known if isinstance(place, int) else complete) for place in chosen
    )
    if not is_known or not len({int(place) for place in chosen}) == len(chosen) == demand.wanted:
        raise ValueError(
            f"`{type(schedule).__name__}.choose` returned {chosen!r:.200}: it has to return None, or `demand.wanted`, "
            f"{demand.wanted}, different places out of `complete`, {list(complete)}."
        )
    return [int(place) for place in chosen]
