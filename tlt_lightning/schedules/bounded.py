"""Bound the age of every token by pacing and deadlines, without throwing text away. Pure.

A group that was begun in iteration b has to be learned from by iteration b + bound, and each iteration learns from
`wanted` groups. So in iteration i, for every k from 0 to the bound: of the open groups that are due by i + k, all but
k * `wanted` have to be taken now. To wait for groups that are due now (k = 0) is not enough from a bound of 2 on, as
more of them may come due at once than one iteration learns from, if younger ones that ended sooner went before.

That as many can be taken follows by induction: at most (bound + 1) * `wanted` groups are open, and of those due by
i + k at most (k + 1) * `wanted`, which one iteration later is the same.
"""

from collections.abc import Sequence
from math import ceil

from typing_extensions import override

from tlt_lightning.schedules.base import PendingGroup, RolloutDemand, RolloutSchedule


class BoundedStaleness(RolloutSchedule):
    """Keeps more groups under way than an iteration learns from, and learns from the oldest that are complete.

    Args:
        bound: Most iterations between the writing of a token and the update that learns from it.
        extra: Groups under way beyond those that an iteration needs, as a share of these; at most `bound`.
    """

    def __init__(self, bound: int, extra: float) -> None:
        self._bound, self._extra = bound, min(extra, bound)

    @override
    def begin(self, demand: RolloutDemand, deferred: Sequence[PendingGroup]) -> tuple[list[PendingGroup], int]:
        wanted, room = demand.wanted, len(deferred)
        if demand.is_first:  # further rollouts of an iteration take some of what the first has left in time
            room = (self._bound + 1) * wanted
        in_time: set[int] = set()
        for group in sorted(deferred, key=lambda group: group.begun_in):
            wait = len(in_time) // wanted if demand.is_first else 0  # iterations that learn from older ones
            if group.responses and demand.iteration + wait - group.begun_in <= self._bound:
                in_time.add(group.draw)
        # The others, too old only after a resume under other settings or on other ranks, are begun anew, or wait on.
        anew = [group.draw for group in deferred if group.draw not in in_time][: max(0, room - len(in_time))]
        groups = [
            group if group.draw in in_time else group.without_responses(demand.iteration)
            for group in deferred
            if group.draw in in_time or group.draw in anew
        ]
        return groups, max(0, wanted + ceil(self._extra * wanted) - len(groups))

    @override
    def choose(
        self, demand: RolloutDemand, groups: Sequence[PendingGroup], complete: Sequence[int]
    ) -> Sequence[int] | None:
        wanted = demand.wanted
        if len(complete) < wanted:
            return None
        for wait in range(self._bound + 1):
            oldest = demand.iteration + wait - self._bound
            num_due = sum(group.begun_in <= oldest for group in groups)
            if sum(groups[place].begun_in <= oldest for place in complete) < min(num_due - wait * wanted, wanted):
                return None
        ordered = sorted(complete, key=lambda place: groups[place].begun_in)  # stable: then in the order of their ends
        return sorted(ordered[:wanted])
