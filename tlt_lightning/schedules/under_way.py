"""Follow a rollout under its schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tlt_lightning.rollout import Request, Response
from tlt_lightning.schedules.base import PendingGroup, RolloutDemand, RolloutSchedule, SynchronousSchedule
from tlt_lightning.seeds import run_seed, seed_of


@dataclass(eq=False)
class RolloutUnderWay:
    """Follows a rollout until its schedule has enough.

    The id of a request is `draw * group_size + member`, unique over the run.

    Args:
        schedule: Decides when that is.
        demand: What it has to bring.
        groups: What it starts and goes on with.
        group_size: Responses of a group.
    """

    schedule: RolloutSchedule
    demand: RolloutDemand
    groups: Sequence[PendingGroup]
    group_size: int

    def __post_init__(self) -> None:
        groups = self.groups
        self._places = {group.draw: place for place, group in enumerate(groups)}
        self.responses = {
            number: replace(response, request_id=number)
            for place, group in enumerate(groups)
            for number, response in zip(self._ids(place), group.responses, strict=False)
        }
        self._asked: set[int] = set()
        self.complete: list[int] = []
        self.chosen: list[int] | None = None
        for place in range(len(groups)):
            self._close(place)

    @classmethod
    def of_all(cls, num_groups: int, group_size: int, *, rank: int = 0, num_ranks: int = 1) -> RolloutUnderWay:
        """Return a rollout that writes everything, of prompts that were dealt to ranks in turn."""
        draws = range(-1 - rank, -1 - rank - num_groups * num_ranks, -num_ranks)  # not those of training
        groups = [PendingGroup(prompt=i, draw=draw, drawn_in=0, begun_in=0) for i, draw in enumerate(draws)]
        return cls(SynchronousSchedule(), RolloutDemand(wanted=num_groups, iteration=0), groups, group_size)

    @property
    def ended(self) -> list[Response]:
        """Responses that have ended."""
        return [response for response in self.responses.values() if not response.is_unfinished]

    def _ids(self, place: int) -> range:
        """Return the ids of a group's requests."""
        first = self.groups[place].draw * self.group_size
        return range(first, first + self.group_size)

    def place_of(self, number: int) -> int:
        """Return the place of the group that a request is of."""
        return self._places[number // self.group_size]

    @property
    def open_ids(self) -> list[int]:
        """Ids of the requests whose responses have not ended."""
        everything = [number for place in range(len(self.groups)) for number in self._ids(place)]
        return [i for i in everything if i not in self.responses or self.responses[i].is_unfinished]

    def requests(
        self, prompts: Sequence[Sequence[int]], *, has_seeds: bool = False, ahead: bool = False
    ) -> list[Request]:
        """Return the requests to the engine; `prompts` are the groups' token ids.

        With `has_seeds` each request has noise of its own, whatever the schedule. Where what was deferred is enough
        there are none, but with `ahead`, for an engine that writes on.
        """
        if self.chosen is not None and not ahead:
            return []
        requests = []
        for i in self.open_ids:
            draw, member = divmod(i, self.group_size)
            place = self._places[draw]
            request = Request(
                id=i,
                prompt_ids=prompts[place],
                group=draw,
                written=self.responses.get(i),
                seed=seed_of(run_seed(), "draw", draw, member) if has_seeds else None,  # whenever and wherever
                expected_tokens=self.groups[place].expected_tokens,
            )
            requests.append(request)
        self._asked = {request.id for request in requests}
        return requests

    def add(self, response: Response) -> bool:
        """Take a response; return True if from now on there is enough, and the open ones are to be stopped."""
        self.responses[response.request_id] = response
        had_enough = self.chosen is not None
        self._close(self.place_of(response.request_id))
        return self.schedule.stops and self.chosen is not None and not had_enough

    @property
    def has_enough(self) -> bool:
        """True if the schedule has chosen, or nothing is wanted."""
        return self.chosen is not None or not self.groups

    def _close(self, place: int) -> None:
        """Count a group whose responses have all ended, and ask the schedule whether there is enough."""
        members = [self.responses.get(number) for number in self._ids(place)]
        if any(response is None or response.is_unfinished for response in members):
            return
        self.complete.append(place)
        if self.chosen is None:
            chosen = self.schedule.choose(self.demand, self.groups, tuple(self.complete))
            self.chosen = None if chosen is None else [*chosen]

    @property
    def taken(self) -> list[int]:
        """Ids of the requests to learn from, in order; ValueError unless they are of as many groups as are wanted."""
        chosen, wanted = self.chosen or (), self.demand.wanted
        if not len({*chosen} & {*self.complete}) == len(chosen) == wanted:
            raise ValueError(
                f"`{type(self.schedule).__name__}.choose` returned {self.chosen} where {self.complete} were complete: "
                f"return `demand.wanted` of these, {wanted}, as soon as there are as many."
            )
        return [number for place in chosen for number in self._ids(place)]

    @property
    def lengths(self) -> list[tuple[int, int]]:
        """Prompt and length of each response that has ended."""
        return [(self.groups[self.place_of(each.request_id)].prompt, len(each.token_ids)) for each in self.ended]

    def deferred(self) -> list[PendingGroup]:
        """Return the groups that wait, with what is written of them; of a response that runs on nothing is known."""
        taken, waiting = {*(self.chosen or ())}, []
        for place, group in enumerate(self.groups):
            if place not in taken:
                # None of a group that was drawn while what was deferred is enough.
                numbers = [number for number in self._ids(place) if number in self.responses or number in self._asked]
                written = [self.responses.get(i, Response(i, [], [], "unfinished", (-1,))) for i in numbers]
                waiting.append(replace(group, deferrals=group.deferrals + 1, responses=tuple(written)))
        return waiting
