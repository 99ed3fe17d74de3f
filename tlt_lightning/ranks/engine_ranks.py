"""Decide what depends on a clock, once for all ranks of an engine; notice when they part."""

from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")


class EngineRanks:
    """Decides alone, for an engine of one rank; `ranks/joined_ranks.py` joins the ranks of larger engines."""

    num_ranks, index = 1, 0
    """Ranks of the engine, and which of them this is."""

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
