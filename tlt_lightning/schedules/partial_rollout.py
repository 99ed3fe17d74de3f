"""Continue unfinished responses in a later iteration (partial rollouts, Kimi k1.5, arXiv 2501.12599)."""

from collections.abc import Sequence
from math import ceil
from typing import Annotated

from typing_extensions import override

from tlt_lightning.arguments import Bound, Count, checked
from tlt_lightning.schedules.base import PendingGroup, RolloutDemand, RolloutSchedule


class PartialRollout(RolloutSchedule):
    """Ends an iteration's rollout once it has enough whole groups; the rest is continued by later weights.

    Off-policy: a response may have segments by several versions of the weights. Each token keeps the log-prob under the
    weights that wrote it, with which the objective's `correction` weighs its loss. An iteration waits for groups that
    have reached `max_policy_lag`; should one exceed it all the same, it is written anew.

    Args:
        extra: Prompts under way beyond those that an iteration needs, as a share of these. Each rank
            rounds up: where one needs a single prompt, 0.5 is as much as 1.
        max_policy_lag: Most iterations between the writing of a token and the update that learns from it.
    """

    @checked("schedule.")
    def __init__(
        self,
        extra: Annotated[float, Bound(0.01, 1)] = 0.5,
        max_policy_lag: Annotated[Count, "SynchronousSchedule has no lag."] = 2,
    ) -> None:
        self.extra = extra
        self.max_policy_lag = max_policy_lag

    @override
    def begin(self, demand: RolloutDemand, deferred: Sequence[PendingGroup]) -> tuple[list[PendingGroup], int]:
        groups = [
            group.without_responses(demand.iteration)
            if not group.responses or demand.iteration - group.begun_in > self.max_policy_lag
            else group
            for group in deferred
        ]
        return groups, max(0, demand.wanted + ceil(self.extra * demand.wanted) - len(groups))

    @override
    def choose(
        self, demand: RolloutDemand, groups: Sequence[PendingGroup], complete: Sequence[int]
    ) -> Sequence[int] | None:
        due = {i for i, group in enumerate(groups) if demand.iteration - group.begun_in >= self.max_policy_lag}
        if len(complete) < demand.wanted or not due <= {*complete}:
            return None
        ordered = sorted(complete, key=lambda place: place not in due)  # stable: then in the order of their ends
        return sorted(ordered[: demand.wanted])
