"""Decide what depends on a clock, which the ranks of one engine must not decide each by its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class Agreement:
    """Decides alone, for an engine of one rank; `engine/vllm/rank_group.py` has that of several."""

    is_first = True
    """Whether this rank decides."""

    def decide(self, choose: Callable[[], T]) -> T:
        """Return what `choose` returns on the engine's first rank; the others do not call it."""
        return choose()


ALONE = Agreement()
