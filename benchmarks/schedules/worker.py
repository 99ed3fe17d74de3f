"""Follow the rollouts of one worker under a schedule, on lengths that are known. Pure."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tlt_lightning.metrics import IterationLog
from tlt_lightning.rollout import Response
from tlt_lightning.schedules import RolloutSchedule
from tlt_lightning.schedules.backlog import Backlog
from tlt_lightning.schedules.base import PendingGroup, RolloutDemand
from tlt_lightning.schedules.under_way import RolloutUnderWay

Array = NDArray[np.float64]
Group = Sequence[int]
DrawGroup = Callable[[random.Random, int], tuple[Group, float]]
"""Draws the lengths of a prompt's responses in an iteration, and the mean of its earlier answers, 0 if unknown."""


class Rollout(NamedTuple):
    """Holds a worker's rollout: pieces of so many tokens of each of the requests that run, and what came of it."""

    tokens: Array
    running: NDArray[np.int64]
    learned: int
    aged: int  # sum over learned tokens of iterations since they were written
    read: int  # tokens of responses that go on, whose keys and values the new weights compute again

    @property
    def written(self) -> float:
        """Tokens written in it."""
        return float(self.tokens @ self.running)


class Worker:
    """Rolls out a share of the prompts under a schedule.

    Args:
        schedule: Decides what is started, and when there is enough.
        wanted: Groups of its share.
        draw_group: Draws lengths.
        seed: Of the draws.
    """

    def __init__(self, schedule: RolloutSchedule, wanted: int, draw_group: DrawGroup, seed: int) -> None:
        self.backlog, self.wanted, self.draw_group = Backlog(schedule), wanted, draw_group
        self.random = random.Random(seed)
        self.lengths: list[Group] = []  # by draw

    def iterate(self, iteration: int, log: IterationLog) -> Rollout:
        """Roll out what one iteration learns from."""
        demand = RolloutDemand(wanted=self.wanted, iteration=iteration)
        groups, num_fresh = self.backlog.begin(demand, log)
        for draw in range(len(self.lengths), len(self.lengths) + num_fresh):
            lengths, expected = self.draw_group(self.random, iteration)
            self.lengths.append(lengths)
            group = PendingGroup(prompt=draw, draw=draw, drawn_in=iteration, begun_in=iteration)
            groups.append(replace(group, expected_tokens=expected))
        groups = self.backlog.start(demand, groups)
        rollout = RolloutUnderWay(self.backlog.schedule, demand, groups, len(self.lengths[0]))
        read = sum(group.num_unfinished_tokens for group in groups)
        tokens, running = write(rollout, self.lengths, iteration)
        self.backlog.end(rollout, log)
        taken = [rollout.responses[number] for number in rollout.taken]
        aged = sum((iteration - version) * count for each in taken for version, count in each.segments)
        learned = sum(len(each.token_ids) for each in taken)
        return Rollout(np.array(tokens, float), np.array(running, int), learned, aged, read)


def seconds_of(rollouts: Sequence[Rollout], cost: Array, reading_ms: float = 0.0) -> float:
    """Return the seconds until the last worker ends, at these milliseconds a token by requests that run, or read."""
    return max(float(each.tokens @ cost[each.running]) + reading_ms * each.read for each in rollouts) / 1e3


def log_values(log: IterationLog) -> dict[str, float]:
    """Return the numbers of a log by name."""
    return {name: value for name, (_, value) in log.read().items()}


def write(rollout: RolloutUnderWay, lengths: Sequence[Group], version: int) -> tuple[list[int], list[int]]:
    """Write until the schedule has enough; return tokens that each running request wrote, and how many ran."""
    requests = rollout.requests([[0]] * len(rollout.groups))
    written = {each.id: each.written for each in requests}
    size = rollout.group_size

    def left(number: int) -> int:
        before = written[number]
        whole = lengths[number // size][number % size]
        return whole - (0 if before is None else len(before.token_ids))

    def respond(number: int, count: int, reason: str) -> bool:
        before = written[number]
        segments = [*(() if before is None else before.segments), (version, count)]
        versions, counts = zip(*segments, strict=True)
        return rollout.add(Response(number, range(sum(counts)), (), reason, versions, version_tokens=counts))

    order = sorted(written, key=left)
    tokens, running, now, has_enough = [], [], 0, False
    while order and not has_enough:
        step = left(order[0]) - now
        tokens.append(step)
        running.append(len(order))
        now += step
        while order and left(order[0]) == now:
            has_enough |= respond(order.pop(0), now, "stop")
    for number in order:
        respond(number, now, "unfinished")
    return tokens, running
