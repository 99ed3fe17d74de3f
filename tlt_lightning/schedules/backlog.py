"""Keep what a schedule defers, and save it."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import torch

from tlt_lightning.arguments import check_argument
from tlt_lightning.engine.base import RolloutEngine
from tlt_lightning.metrics import IterationLog
from tlt_lightning.objectives.base import PolicyObjective
from tlt_lightning.rollout import Response, Sampling
from tlt_lightning.schedules.base import PendingGroup, RolloutDemand, RolloutSchedule, SynchronousSchedule
from tlt_lightning.schedules.under_way import RolloutUnderWay

log = logging.getLogger(__name__)


class Backlog:
    """Keeps the groups that were deferred on a rank, and counts what became of them.

    Args:
        schedule: Defers them and takes them up again; None is synchronous.
    """

    def __init__(self, schedule: RolloutSchedule | None) -> None:
        check_argument("schedule", schedule, RolloutSchedule | None)
        self.schedule = schedule or SynchronousSchedule()
        self.deferred: list[PendingGroup] = []
        self.written_in: dict[int, int] = {}
        """Iteration in which each version of the weights wrote: of that of now, and all since the oldest that waits."""

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
        is_behaviour = objective.clips_behaviour(asynchronous=self.schedule.is_asynchronous)
        if not (objective.learns_off_policy or is_behaviour):
            raise ValueError(
                f"`data.schedule` {name} learns from tokens of older weights, and `objective.correction` is None: "
                f"nothing would make up for it. Leave `correction` at its default. {remedy}"
            )
        if sampling.stop_strings:
            raise ValueError(
                f"`sampling.stop_strings` is {sampling.stop_strings}: with `data.schedule` {name} one across the seam "
                f"of a continued response would be missed. Use `stop_token_ids`. {remedy}"
            )

    def note_weights(self, version: int, iteration: int) -> None:
        """Note that an iteration writes with this version of the weights."""
        oldest = min((group.begun_in for group in self.deferred), default=iteration)
        self.written_in = {each: at for each, at in self.written_in.items() if at >= oldest} | {version: iteration}

    def begin(self, demand: RolloutDemand, log: IterationLog) -> tuple[list[PendingGroup], int]:
        """Take up groups as the schedule says; return them, and how many to draw besides."""
        groups, num_fresh = self.schedule.begin(demand, tuple(self.deferred))
        taken_up = {group.draw: group for group in groups}
        before = [group for group in self.deferred if group.draw in taken_up]
        self.deferred = [group for group in self.deferred if group.draw not in taken_up]
        thrown_away = [group for group in before if not taken_up[group.draw].responses]
        if any(group.responses for group in before):
            log.sum("schedule/tokens_thrown_away", sum(group.num_tokens for group in thrown_away))
            log.sum("schedule/tokens_read_again", sum(group.num_unfinished_tokens for group in groups))
        return groups, num_fresh

    def start(self, demand: RolloutDemand, groups: Sequence[PendingGroup]) -> list[PendingGroup]:
        """Defer those of the groups taken up and drawn that the schedule does not start; return the others."""
        started = {*self.schedule.start(demand, groups)}
        waiting = [group for place, group in enumerate(groups) if place not in started]
        self.deferred = [*self.deferred, *(replace(group, deferrals=group.deferrals + 1) for group in waiting)]
        return [group for place, group in enumerate(groups) if place in started]

    def end(self, rollout: RolloutUnderWay, log: IterationLog) -> None:
        """Defer the groups that the rollout has not taken; log those that it has, where any may wait."""
        self.deferred = [*self.deferred, *rollout.deferred()]
        if not self.schedule.defers:
            return
        for place in rollout.chosen or ():
            group = rollout.groups[place]
            log.max("schedule/deferrals", group.deferrals)
            log.max("schedule/waited", rollout.demand.iteration - group.drawn_in)
        for number in rollout.taken if self.schedule.continues else ():
            log.mean("schedule/continued", float(len(rollout.responses[number].segments) > 1))

    def put_aside(self, responses: Sequence[Response]) -> None:
        """Take what has been written of groups that wait, from a stream that was stopped."""
        found = {response.request_id: response for response in responses}
        self.deferred = [
            replace(group, responses=tuple(found.get(each.request_id, each) for each in group.responses))
            for group in self.deferred
        ]

    def state_dict(self, deferred: Sequence[PendingGroup]) -> dict[str, Any]:
        """Return these groups, and `written_in`, as tensors and primitives."""
        return {"deferred": [*map(pack, deferred)], "written_in": self.written_in}

    def load(
        self, ranks: Sequence[Mapping[str, Any]], rank: int, world_size: int, *, group_size: int, max_tokens: int
    ) -> None:
        """Load what the ranks have saved by `state_dict`; another number of ranks deals groups out anew.

        Of larger groups the first `group_size` responses are kept, and none of a group that holds one which has
        outgrown `max_tokens`.
        """
        groups = [state["deferred"] for state in ranks]
        is_same = len(groups) == world_size
        saved = groups[rank] if is_same else [state for each in groups for state in each][rank::world_size]
        self.written_in = {version: at for state in ranks for version, at in state["written_in"].items()}
        self.deferred = []
        for group in map(unpack, saved):
            responses = group.responses[:group_size]
            is_outgrown = any(len(each.token_ids) + each.is_unfinished > max_tokens for each in responses)
            self.deferred.append(replace(group, responses=() if is_outgrown else responses))
        held = [response for group in self.deferred for response in group.responses]
        if num_lost := sum(each.is_unfinished and not each.token_ids for each in held):
            log.info("%d responses were being written when the run was saved, and are begun anew.", num_lost)


# In a checkpoint tokens are tensors: lists of them would hold a run up, copying and reading takes seconds a million.


def pack(group: PendingGroup) -> dict[str, Any]:
    """Return a group as a checkpoint holds it, in tensors and primitives."""
    return {**_fields(group), "responses": [_pack_response(response) for response in group.responses]}


def unpack(state: Mapping[str, Any]) -> PendingGroup:
    """Return the group that `pack` packed."""
    return PendingGroup(**{**state, "responses": tuple(_unpack_response(each) for each in state["responses"])})


def _pack_response(response: Response) -> dict[str, Any]:
    drafters = sorted({drafter for _, drafter, _, _ in response.drafts})
    drafts = [(at, drafters.index(drafter), drafted, kept) for at, drafter, drafted, kept in response.drafts]
    return _fields(response) | {
        "token_ids": torch.tensor(response.token_ids, dtype=torch.int32),
        "logps": torch.tensor(response.logps, dtype=torch.float64),
        "drafts": torch.tensor(drafts, dtype=torch.int32),
        "drafters": drafters,
    }


def _unpack_response(state: Mapping[str, Any]) -> Response:
    values = dict(state)
    drafters = values.pop("drafters")
    drafts = [(at, drafters[number], drafted, kept) for at, number, drafted, kept in values["drafts"].tolist()]
    values |= {"token_ids": values["token_ids"].tolist(), "logps": values["logps"].tolist(), "drafts": drafts}
    return Response(**values)


def _fields(instance: PendingGroup | Response) -> dict[str, Any]:
    return {item.name: getattr(instance, item.name) for item in fields(instance)}
