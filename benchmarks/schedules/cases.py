"""Draw lengths of groups as they were recorded, or with a set share of long responses."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import numpy as np

from benchmarks.end_to_end.run import read_runs, recorded_lengths
from benchmarks.schedules.worker import DrawGroup, Group

RECORDED = ("25m", "25m_cold_start", "25m_schedules", "25m_rising")
"""Results of `end_to_end` whose plain natural run recorded lengths."""
SIZE = 8
"""Responses of a recorded group."""
NUM_RESPONSES = 256
"""Responses that an iteration learns from, on all workers."""
EXTRAS = (0.25, 0.5, 1.0)


@dataclass(frozen=True, kw_only=True)
class Case:
    """Holds what is rolled out.

    Args:
        name: Of the lengths.
        draw_group: Draws a prompt's.
        size: Responses of a group.
        workers: Engines with a share each.
        is_recorded: True if groups are taken as they were recorded.
        groups: Share of the groups with a long response.
        reach: Longest response of a group at the quantiles 1 / (1 + extra) over the groups, as shares of the longest.
    """

    name: str
    draw_group: DrawGroup
    size: int
    workers: int
    is_recorded: bool
    groups: float
    reach: Mapping[float, float]


def case_of(name: str, draw_group: DrawGroup, most: int, *, workers: int = 1, is_recorded: bool = False) -> Case:
    """Return the case of such groups, with what a sample of them shows; `most` tokens has the longest response."""
    draw = random.Random(1)
    groups = [draw_group(draw, 0) for _ in range(4000)]
    longest = [max(group) for group in groups]
    reach = {extra: float(np.quantile(longest, 1 / (1 + extra))) / most for extra in EXTRAS}
    return Case(
        name=name,
        draw_group=draw_group,
        size=len(groups[0]),
        workers=workers,
        is_recorded=is_recorded,
        groups=fmean(each > most / 2 for each in longest),
        reach=reach,
    )


def groups_of(iterations: Sequence[Sequence[int]]) -> list[Group]:
    """Return the groups that lengths by iteration and request are of."""
    return [each[at : at + SIZE] for each in iterations for at in range(0, len(each), SIZE)]


def recorded_cases(results: Path, workers: Sequence[int]) -> list[Case]:
    """Return the cases of recorded groups."""
    cases = []
    for name in RECORDED:
        lengths = recorded_lengths(read_runs(results / f"end_to_end_{name}.json"))
        groups = groups_of((lengths or [])[1:])
        most = max(map(max, groups))
        label = f"`{name}`, at most {most:,}"
        draw_group = _choose_from(groups)
        cases += [case_of(label, draw_group, most, workers=count, is_recorded=True) for count in workers]
    return cases


def resampled_cases(results: Path, sizes: Sequence[int], shares: Sequence[float]) -> list[Case]:
    """Return cases whose responses are drawn one by one, long ones with a set probability."""
    lengths = recorded_lengths(read_runs(results / f"end_to_end_{RECORDED[0]}.json")) or []
    pool = [each for iteration in lengths[1:] for each in iteration]
    most = max(pool)
    pools = [each for each in pool if each <= most / 2], [each for each in pool if each > most / 2]

    def drawing(size: int, share: float) -> DrawGroup:
        return lambda draw, _: [draw.choice(pools[draw.random() < share]) for _ in range(size)]

    return [case_of(f"{share:.1%} long", drawing(size, share), most) for size in sizes for share in shares]


def _choose_from(groups: Sequence[Group]) -> DrawGroup:
    return lambda draw, _: draw.choice(groups)
