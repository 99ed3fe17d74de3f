"""Decide what depends on a clock, once for all ranks of an engine; notice when they part."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")


class EngineRanks:
    """Decides alone, for an engine of one rank; `ranks/joined_ranks.py` joins the ranks of larger engines."""

    num_ranks, index = 1, 0
    """Ranks of the engine, and which of them this is."""
    in_rollout = False
    """True while the ranks meet at every step, so that none may part from the others."""

    def enter_rollout(self) -> None:
        """Note that all ranks are in a rollout from now on."""
        self.in_rollout = True

    def begin_step(self) -> None:
        """Note that this rank begins an engine step, in which it waits for the others."""

    def leave_rollout(self) -> None:
        """Note that this rank has left the rollout; safe to call twice."""
        self.in_rollout = False

    @property
    def is_first(self) -> bool:
        """True on the rank that decides."""
        return self.index == 0

    def decide(self, choose: Callable[[], T]) -> T:
        """Return what `choose` returns on the engine's first rank; the others do not call it."""
        return choose()

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, the first one's first."""
        return [value]

    def is_any(self, flag: bool) -> bool:
        """Return whether the flag is set on any rank."""
        return flag

    def note(self, numbers: Iterable[int]) -> None:
        """Note what must be equal on all ranks; `decide` and `is_any` compare all that was noted."""


ALONE = EngineRanks()
