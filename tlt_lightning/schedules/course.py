"""Follow a rollout under its schedule, and keep what it puts aside."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tlt_lightning.arguments import check_argument
from tlt_lightning.objectives.composed import ComposedObjective
from tlt_lightning.rollout import Request, Response
from tlt_lightning.schedules.base import Demand, OpenGroup, RolloutSchedule, begin_of, choice_of
from tlt_lightning.schedules.saved_group import pack, unpack
from tlt_lightning.schedules.synchronous import SynchronousSchedule
from tlt_lightning.seeds import run_seed, seed_of

if TYPE_CHECKING:
    from tlt_lightning.engine.base import RolloutEngine
    from tlt_lightning.metrics import IterationLog
    from tlt_lightning.objectives.base import PolicyObjective
    from tlt_lightning.rollout import Sampling

log = logging.getLogger(__name__)


class RolloutCourse:
    """Follows a rollout until its schedule has enough.

    Requests are numbered through: the `group_size` of the first group, then those of the next.

    Args:
        schedule: Decides when that is.
        demand: What it has to bring.
        groups: What it starts and goes on with.
        group_size: Responses of a group.
        earlier: Earlier answers by prompt, to draft from.
        twins: What other weights wrote, by the seed of the response that it drafts for.
    """

    def __init__(
        self,
        schedule: RolloutSchedule,
        demand: Demand,
        groups: Sequence[OpenGroup],
        group_size: int,
        earlier: Mapping[int, Sequence[Sequence[int]]] | None = None,
        twins: Mapping[int, Sequence[int]] | None = None,
    ) -> None:
        self.schedule, self.demand, self.groups, self.group_size = schedule, demand, groups, group_size
        self.earlier, self.twins = earlier or {}, twins or {}
        self.responses = {
            place * group_size + member: replace(response, request_id=place * group_size + member)
            for place, group in enumerate(groups)
            for member, response in enumerate(group.responses)
        }
        self.complete: list[int] = []
        self.chosen: list[int] | None = None
        for place in range(len(groups)):
            self._close(place)

    @classmethod
    def of_all(cls, num_groups: int, group_size: int, *, rank: int = 0, num_ranks: int = 1) -> RolloutCourse:
        """Return the course of a rollout that writes everything, of prompts that were dealt to ranks in turn."""
        draws = range(-1 - rank, -1 - rank - num_groups * num_ranks, -num_ranks)  # not those of training
        groups = [OpenGroup(prompt=i, draw=draw, drawn=0, begun=0) for i, draw in enumerate(draws)]
        return cls(SynchronousSchedule(), Demand(wanted=num_groups, iteration=0), groups, group_size)

    @property
    def ended(self) -> list[Response]:
        """Responses that have ended."""
        return [response for response in self.responses.values() if not response.is_unfinished]

    @property
    def open_ids(self) -> list[int]:
        """Numbers of the requests whose responses have not ended."""
        everything = range(len(self.groups) * self.group_size)
        return [i for i in everything if i not in self.responses or self.responses[i].is_unfinished]

    def requests(self, prompts: Sequence[Sequence[int]], first_group: int, *, has_seeds: bool = False) -> list[Request]:
        """Return the requests to the engine; `prompts` are the groups' token ids.

        With `has_seeds` each request has noise of its own, whatever the schedule.
        """
        if self.chosen is not None:  # what was put aside is enough
            return []
        texts = [[*self.earlier.get(group.prompt, ()), *_ended_texts(group)] for group in self.groups]
        twins = {i: self.twins.get(self._seed(i), ()) for i in self.open_ids}
        for i, twin in twins.items():
            texts[i // self.group_size] += [twin] if len(twin) else []
        return [
            Request(
                id=i,
                prompt_ids=prompts[i // self.group_size],
                group=first_group + i // self.group_size,
                written=self.responses.get(i),
                seed=self._seed(i) if has_seeds or self.schedule.has_own_noise else None,
                expected_tokens=self.groups[i // self.group_size].expected_tokens,
                earlier_answers=texts[i // self.group_size],
                twin=twin,
            )
            for i, twin in twins.items()
        ]

    def add(self, response: Response) -> bool:
        """Take a response; return True if from now on there is enough, and the open ones are to be stopped."""
        self.responses[response.request_id] = response
        had_enough = self.chosen is not None
        self._close(response.request_id // self.group_size)
        return self.schedule.stops and self.chosen is not None and not had_enough

    def _close(self, place: int) -> None:
        """Count a group whose responses have all ended, and ask the schedule whether there is enough."""
        members = [self.responses.get(i) for i in range(place * self.group_size, (place + 1) * self.group_size)]
        if any(response is None or response.is_unfinished for response in members):
            return
        self.complete.append(place)
        if self.chosen is None:
            self.chosen = choice_of(self.schedule, self.demand, self.groups, tuple(self.complete))

    @property
    def taken(self) -> list[int]:
        """Numbers of the requests to learn from, in order."""
        size = self.group_size
        return [place * size + member for place in self.chosen or () for member in range(size)]

    @property
    def texts(self) -> list[tuple[int, array[int]]]:
        """Prompt and tokens of each response to learn from."""
        return [
            (self.groups[number // self.group_size].prompt, array("i", self.responses[number].token_ids))
            for number in self.taken
        ]

    @property
    def lengths(self) -> list[tuple[int, int]]:
        """Prompt and length of each response that has ended."""
        return [(self.groups[each.request_id // self.group_size].prompt, len(each.token_ids)) for each in self.ended]

    def put_aside(self) -> list[OpenGroup]:
        """Return the groups that wait, with what is written of them."""
        size, waiting = self.group_size, []
        for place, group in enumerate(self.groups):
            if place not in (self.chosen or ()):
                # None of a group that was drawn while what was put aside is enough.
                written = [self.responses[i] for i in range(place * size, (place + 1) * size) if i in self.responses]
                waiting.append(replace(group, deferrals=group.deferrals + 1, responses=tuple(written)))
        return waiting

    def _seed(self, number: int) -> int:
        return response_seed(self.groups[number // self.group_size].draw, number % self.group_size)


class Backlog:
    """Keeps the groups that were put aside on a rank, and counts what became of them.

    Args:
        schedule: Puts them aside and takes them up again; None is synchronous.
    """

    def __init__(self, schedule: RolloutSchedule | None) -> None:
        check_argument("schedule", schedule, RolloutSchedule | None)
        self.schedule = schedule or SynchronousSchedule()
        self.aside: list[OpenGroup] = []
        self.written_in: dict[int, int] = {}
        """Iteration in which each version of the weights wrote, of those that wrote what waits and that of now."""
        self._dropped: dict[int, tuple[Response, ...]] = {}  # what was thrown away of groups now written anew, by draw

    def check(self, engine: RolloutEngine, sampling: Sampling, objective: PolicyObjective) -> None:
        """Raise ValueError if the schedule cannot work with these."""
        name = type(self.schedule).__name__
        if self.schedule.stops and not engine.can_stop:
            raise ValueError(
                f"`data.engine` {type(engine).__name__} cannot stop requests, which `data.schedule` {name} asks for; "
                "use VLLMEngine, or SynchronousSchedule."
            )
        if not self.schedule.continues:
            return
        remedy = "Use TailBatching, or set `continues = False` in a schedule of yours that begins groups anew."
        if isinstance(objective, ComposedObjective) and objective.correction is None:
            raise ValueError(
                f"`data.schedule` {name} learns from tokens of older weights, and `objective.correction` is None: "
                f"nothing would make up for it. Leave `correction` at its default. {remedy}"
            )
        if sampling.stop_strings:
            raise ValueError(
                f"`sampling.stop_strings` is {sampling.stop_strings}: with `data.schedule` {name} one across the seam "
                f"of a continued response would be missed. Use `stop_token_ids`. {remedy}"
            )

    def warn_of_few(self, num_prompts: int, per_iteration: int, num_ranks: int) -> None:
        """Warn if an iteration may draw more prompts than there are."""
        num_drawn = num_ranks * self._num_begun(per_iteration // num_ranks)
        if num_prompts < num_drawn:
            log.warning(
                "An iteration draws up to %d prompts (`data.prompts_per_iteration` %d, `data.schedule` %s), but "
                "`data.train` has %d: it answers some more than once, in groups of their own.",
                *(num_drawn, per_iteration, type(self.schedule).__name__, num_prompts),
            )

    def warn_of_waiting(self, engine: RolloutEngine, num_wanted: int, group_size: int) -> None:
        """Warn if responses wait for others to end; `num_wanted` groups are a rank's share of an iteration."""
        num_begun = self._num_begun(num_wanted) * group_size * engine.num_ranks
        if engine.max_num_seqs is not None and num_begun > engine.max_num_seqs:
            log.warning(
                "%s responses wait for %s places in the engine, which lengthens the long tail; raise "
                "`data.engine.max_num_seqs` as far as its cache allows.",
                f"{num_begun:,}",
                f"{engine.max_num_seqs:,}",
            )

    def _num_begun(self, num_wanted: int) -> int:
        """Return how many groups a run's first iteration begins with."""
        return begin_of(self.schedule, Demand(wanted=num_wanted, iteration=0))[1]

    def note_weights(self, version: int, iteration: int) -> None:
        """Note that an iteration writes with this version of the weights."""
        held = {each for group in self.aside for response in group.responses for each in response.policy_versions}
        self.written_in = {each: self.written_in[each] for each in held & self.written_in.keys()} | {version: iteration}

    @property
    def twins(self) -> dict[int, Sequence[int]]:
        """Texts that were thrown away and are now written anew, by the seeds of their responses."""
        return texts_by_seed(self._dropped)

    def begin(self, demand: Demand, log: IterationLog) -> tuple[list[OpenGroup], int]:
        """Take up groups as the schedule says; return them, and how many to draw besides."""
        groups, num_fresh = begin_of(self.schedule, demand, self.aside)
        kept = {group.draw: group for group in groups}
        before = [group for group in self.aside if group.draw in kept]
        self.aside = [group for group in self.aside if group.draw not in kept]
        self._dropped = {
            group.draw: group.responses for group in before if group.responses and not kept[group.draw].responses
        }
        if before:
            dropped = sum(group.num_tokens for group in before if group.draw in self._dropped)
            log.sum("schedule/tokens_thrown_away", dropped)
            log.sum("schedule/tokens_read_again", sum(group.num_unfinished_tokens for group in groups))
        return groups, num_fresh

    def end(self, course: RolloutCourse, log: IterationLog) -> None:
        """Put aside the groups that the rollout has not taken, and log those that it has, where any may wait.

        Raise ValueError if it has taken none.
        """
        if course.demand.wanted and course.chosen is None:
            raise ValueError(
                f"`{type(self.schedule).__name__}.choose` returned None to the end, with {len(course.complete)} of "
                f"{len(course.groups)} groups complete: choose `demand.wanted`, {course.demand.wanted}, once that many "
                "are."
            )
        self.aside = [*self.aside, *course.put_aside()]
        if not self.schedule.stops:
            return
        taken = [course.groups[place] for place in course.chosen or ()]
        for group in taken:
            log.max("schedule/deferrals", group.deferrals)
            log.max("schedule/waited", course.demand.iteration - group.drawn)
            log.mean("schedule/dropped", float(group.draw in self._dropped))
        for number in course.taken:
            response, group = course.responses[number], course.groups[number // course.group_size]
            log.mean("schedule/continued", float(len(response.segments) > 1))
            member = number % course.group_size
            for old in self._dropped.get(group.draw, ())[member : member + 1]:  # none if the group has grown
                if tokens := old.token_ids:
                    same = [a == b for a, b in zip(tokens, response.token_ids, strict=False)]
                    log.mean("schedule/repeated", [*same, False].index(False) / len(tokens))

    def state_dict(self, aside: Sequence[OpenGroup] | None = None) -> dict[str, Any]:
        """Return `aside`, None those put aside now, and `written_in`, as tensors and primitives."""
        return {"aside": [*map(pack, self.aside if aside is None else aside)], "written_in": self.written_in}

    def load(
        self, ranks: Sequence[Mapping[str, Any]], rank: int, world_size: int, *, group_size: int, max_tokens: int
    ) -> None:
        """Load what the ranks have saved by `state_dict`; another number of ranks deals groups out anew.

        Of larger groups the first `group_size` responses are kept, and none of a group that holds one which has
        outgrown `max_tokens`.
        """
        aside = [state["aside"] for state in ranks]
        saved = aside[rank] if len(aside) == world_size else [state for own in aside for state in own][rank::world_size]
        self.written_in = {}
        for state in ranks:
            self.written_in |= state["written_in"]
        self.aside, num_outgrown = [], 0
        for group in map(unpack, saved):
            responses = group.responses[:group_size]
            is_outgrown = any(len(each.token_ids) + each.is_unfinished > max_tokens for each in responses)
            num_outgrown += is_outgrown
            self.aside.append(replace(group, responses=() if is_outgrown else responses))
        if num_outgrown:
            log.warning(
                "%d prompts that a schedule had put aside have responses beyond `sampling.max_tokens` %d, and are "
                "answered anew.",
                *(num_outgrown, max_tokens),
            )


def response_seed(draw: int, member: int) -> int:
    """Return the seed of a response, the same whenever and wherever it is written."""
    return seed_of(run_seed(), "draw", draw, member)


def texts_by_seed(responses: Mapping[int, Sequence[Response]]) -> dict[int, Sequence[int]]:
    """Return texts by the seeds of their responses; `responses` are those of groups, by draw."""
    return {
        response_seed(draw, member): response.token_ids
        for draw, group in responses.items()
        for member, response in enumerate(group)
    }


def _ended_texts(group: OpenGroup) -> list[Sequence[int]]:
    """Return the group's responses that are kept and have ended; each had noise of its own."""
    return [response.token_ids for response in group.responses if not response.is_unfinished]
