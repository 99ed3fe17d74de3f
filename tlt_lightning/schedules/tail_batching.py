"""Batch the long tail: prompts with long responses wait for a rollout of their own (RollPacker, arXiv 2509.21009)."""

from collections.abc import Sequence
from math import ceil
from typing import Annotated, ClassVar

from typing_extensions import override

from tlt_lightning.arguments import Bound, checked
from tlt_lightning.schedules.base import Demand, OpenGroup, RolloutSchedule


class TailBatching(RolloutSchedule):
    """Starts more prompts than an iteration needs, takes the first whose responses have all ended, defers the others.

    Once each rank has deferred as many prompts as an iteration needs, the next iteration answers these, and waits for
    all of them: no prompt is deferred twice. Current weights answer them anew, so that each update is on-policy, and
    with the noise of the first time. Where the same noise gives the same text, a cycle of short and long iterations
    chooses nothing by length. Noise gives another text where weights have moved, and on vLLM's V1 runner, or with
    sampled drafts without look-ups, where speculation drafted otherwise; then learning leans to short responses.
    `schedule/repeated` is the share of deferred tokens that were written again.

    Groups are taken whole. RollPacker starts more responses than a group needs and takes the first, the short ones.

    Args:
        extra: Prompts that are started beyond those needed, as a share of these. One iteration in
            `1 + 1 / extra` is a long one. Each rank rounds up: where one needs 2 prompts, 0.25 is as much as 0.5.
    """

    continues: ClassVar[bool] = False
    has_own_noise: ClassVar[bool] = True

    @checked("schedule.")
    def __init__(self, extra: Annotated[float, Bound(0.01, 1)] = 0.25) -> None:
        self.extra = extra

    @override
    def begin(self, demand: Demand, aside: Sequence[OpenGroup]) -> tuple[list[OpenGroup], int]:
        if not demand.is_first:  # of what dynamic sampling replaces nothing is deferred: the ranks stay together
            return [], demand.wanted
        num_ready = len(aside) if demand.least_aside is None else demand.least_aside
        if num_ready >= demand.wanted:
            return [group.anew(demand.iteration) for group in aside[: demand.wanted]], 0
        return [], demand.wanted + ceil(self.extra * demand.wanted)

    @override
    def choose(self, demand: Demand, groups: Sequence[OpenGroup], complete: Sequence[int]) -> list[int] | None:
        return sorted(complete[: demand.wanted]) if len(complete) >= demand.wanted else None
