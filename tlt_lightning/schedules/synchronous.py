"""Roll out what an iteration needs, to the end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from typing_extensions import override

from tlt_lightning.schedules.base import Demand, OpenGroup, RolloutSchedule


class SynchronousSchedule(RolloutSchedule):
    """Starts the groups of an iteration and waits for the last of their responses.

    On-policy. Groups that another schedule of the resumed run has put aside come first, and are written anew.
    """

    stops: ClassVar[bool] = False
    continues: ClassVar[bool] = False

    @override
    def begin(self, demand: Demand, aside: Sequence[OpenGroup]) -> tuple[list[OpenGroup], int]:
        groups = [group.anew(demand.iteration) for group in aside[: demand.wanted]]
        return groups, demand.wanted - len(groups)

    @override
    def choose(self, demand: Demand, groups: Sequence[OpenGroup], complete: Sequence[int]) -> list[int] | None:
        return list(range(len(groups))) if len(complete) == len(groups) else None
