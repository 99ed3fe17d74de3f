"""Write ahead of learning, by a bounded number of iterations (AReaL, arXiv 2505.24298, without its throwing away)."""

from typing import Annotated

from tlt_lightning.arguments import Bound, CountOrZero, checked
from tlt_lightning.schedules.bounded import BoundedStaleness


class AsyncRollout(BoundedStaleness):
    """Lets requests run on while the policy learns, at most `max_staleness` iterations ahead of it.

    An iteration gives the engine the newest weights amid what it writes, asks for more, and learns from the oldest
    groups that are complete, waiting only for those that would come too late otherwise. Nothing is thrown away.

    Requests run on in an engine that takes weights while it writes (`updates_running`), keeps its memory meanwhile
    (`sleep: false`) and is one rank's own; in every other they are stopped, and continued by the next weights: then
    this is PartialRollout with `extra` and `max_policy_lag` of `max_staleness`. What may be so many iterations ahead is
    so many ahead as a rule: `schedule/age` says by how many.

    Args:
        max_staleness: Most iterations between the writing of a token and the update that learns from it; 0 is
            SynchronousSchedule.
        extra: Prompts under way beyond those that an iteration needs, as a share of these; None is `max_staleness`,
            which is as far ahead as the bound allows. Less makes text younger, and waits more for long responses.
    """

    @checked("schedule.")
    def __init__(self, max_staleness: CountOrZero = 1, extra: Annotated[float, Bound(0)] | None = None) -> None:
        super().__init__(max_staleness, max_staleness if extra is None else extra)
        self.max_staleness, self.extra = max_staleness, extra
        self.defers = self.stops = self.continues = self.is_asynchronous = max_staleness > 0
