"""Continue unfinished responses in a later iteration (partial rollouts, Kimi k1.5, arXiv 2501.12599)."""

from typing import Annotated

from tlt_lightning.arguments import Bound, Count, checked
from tlt_lightning.schedules.bounded import BoundedStaleness


class PartialRollout(BoundedStaleness):
    """Ends an iteration's rollout once it has enough whole groups; the rest is continued by later weights.

    Off-policy: a response may have segments by several versions of the weights. Each token keeps the log-prob under the
    weights that wrote it, with which the objective's `correction` weighs its loss. An iteration waits for groups that
    would come too late otherwise: none exceeds `max_policy_lag`.

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
        super().__init__(max_policy_lag, extra)
        self.extra, self.max_policy_lag = extra, max_policy_lag
