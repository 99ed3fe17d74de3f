"""Draw lengths of groups as they were recorded, or with a set share of long responses."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from benchmarks.end_to_end.run import read_runs, recorded_lengths
from benchmarks.schedules.worker import DrawGroup, Group

RECORDED = ("25m", "25m_cold_start", "25m_schedules", "25m_rising")
"""Results of `end_to_end` whose plain natural run recorded lengths."""
SIZE = 8
"""Responses of a recorded group."""
NUM_RESPONSES = 256
"""Responses that an iteration learns from, on all workers."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """Holds what is rolled out.

    Args:
        name: Of the lengths.
        draw_group: Draws a prompt's.
        size: Responses of a group.
        workers: Engines with a share each.
        is_recorded: True if groups are taken as they were recorded.
        has_earlier: True if prompts have earlier answers.
        groups: Share of the groups with a long response.
    """

    name: str
    draw_group: DrawGroup
    size: int
    workers: int
    is_recorded: bool
    has_earlier: bool
    groups: float


def case_of(name: str, draw_group: DrawGroup, most: int, *, workers: int = 1, is_recorded: bool = False) -> Case:
    """Return the case of such groups, with what a sample of them shows; `most` tokens has the longest response."""
    draw = random.Random(1)
    groups, expected = zip(*(draw_group(draw, 0) for _ in range(4000)), strict=True)
    return Case(
        name=name,
        draw_group=draw_group,
        size=len(groups[0]),
        workers=workers,
        is_recorded=is_recorded,
        has_earlier=any(expected),
        groups=fmean(max(group) > most / 2 for group in groups),
    )


def groups_of(iterations: Sequence[Sequence[int]]) -> list[Group]:
    """Return the groups that lengths by iteration and request are of."""
    return [each[at : at + SIZE] for each in iterations for at in range(0, len(each), SIZE)]


def recorded_cases(results: Path, workers: Sequence[int]) -> list[Case]:
    """Return the cases of recorded groups, whole, and halved: the other half are then the prompt's earlier answers."""
    cases = []
    for name in RECORDED:
        lengths = recorded_lengths(read_runs(results / f"end_to_end_{name}.json"))
        groups = groups_of((lengths or [])[1:])
        most = max(map(max, groups))
        label = f"`{name}`, at most {most:,}"
        for kind, draw_group in ((label, whole(groups)), (f"{label}, halves", half(groups))):
            cases += [case_of(kind, draw_group, most, workers=count, is_recorded=True) for count in workers]
    return cases


def resampled_cases(results: Path, sizes: Sequence[int], shares: Sequence[float]) -> list[Case]:
    """Return cases whose responses are drawn one by one, long ones with a set probability."""
    lengths = recorded_lengths(read_runs(results / f"end_to_end_{RECORDED[0]}.json")) or []
    pool = [each for iteration in lengths[1:] for each in iteration]
    most = max(pool)
    pools = [each for each in pool if each <= most / 2], [each for each in pool if each > most / 2]

    def drawing(size: int, share: float) -> DrawGroup:
        return lambda draw, _: ([draw.choice(pools[draw.random() < share]) for _ in range(size)], 0.0)

    return [case_of(f"{share:.1%} long", drawing(size, share), most) for size in sizes for share in shares]


def whole(groups: Sequence[Group]) -> DrawGroup:
    """Return whole groups, of whose prompts nothing was known."""
    return lambda draw, _: (draw.choice(groups), 0.0)


def half(groups: Sequence[Group]) -> DrawGroup:
    """Return half of a group; the other half are the earlier answers."""

    def draw_group(draw: random.Random, _: int) -> tuple[Group, float]:
        group = draw.sample(draw.choice(groups), SIZE)
        return group[: SIZE // 2], fmean(group[SIZE // 2 :])

    return draw_group
