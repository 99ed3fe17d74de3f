"""Batch the long tail: prompts with long answers wait for their own rollout (after RollPacker, arXiv 2509.21009)."""

from collections.abc import Sequence
from math import ceil
from statistics import fmean
from typing import Annotated

from typing_extensions import override

from tlt_lightning.arguments import Bound, checked
from tlt_lightning.schedules.base import PendingGroup, RolloutDemand, SynchronousSchedule


class TailBatching(SynchronousSchedule):
    """Lets the prompts whose earlier answers were longest wait for an iteration of their own.

    A short iteration draws `extra` more prompts than it needs and defers as many, those with the longest earlier
    answers; it waits for all others. Once each rank has deferred as many as an iteration needs, a long iteration
    answers these. Each prompt is answered once, by the weights of its iteration, to the end: on-policy, and nothing is
    thrown away.

    What waits hangs on nothing that is learned from, so a cycle of short and long iterations learns from what
    synchronous ones would. RollPacker defers what turns out long and answers it anew: learning then leans to short
    responses. A prompt without earlier answers counts as the mean of the others; in the first pass over the prompts
    nothing is known, and nothing gained.

    Args:
        extra: Prompts drawn beyond those needed, as a share of these. One iteration in `1 + 1 / extra` is a long one.
            Each rank rounds up: where one needs 2 prompts, 0.25 is as much as 0.5.
    """

    defers = True

    @checked("schedule.")
    def __init__(self, extra: Annotated[float, Bound(0.01, 1)] = 0.25) -> None:
        self.extra = extra

    @override
    def begin(self, demand: RolloutDemand, deferred: Sequence[PendingGroup]) -> tuple[list[PendingGroup], int]:
        if not demand.is_first:  # of what dynamic sampling replaces nothing is deferred: the ranks stay together
            return [], demand.wanted
        num_ready = len(deferred) if demand.least_deferred is None else demand.least_deferred
        if num_ready >= demand.wanted:
            return super().begin(demand, deferred)
        return [], demand.wanted + ceil(self.extra * demand.wanted)

    @override
    def start(self, demand: RolloutDemand, groups: Sequence[PendingGroup]) -> Sequence[int]:
        known = [group.expected_tokens for group in groups if group.expected_tokens]
        typical = fmean(known) if known else 0.0
        shortest = sorted(range(len(groups)), key=lambda place: groups[place].expected_tokens or typical)
        return sorted(shortest[: demand.wanted])
