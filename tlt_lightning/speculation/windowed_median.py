"""The median of the last values, kept up to date as they arrive."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable


class WindowedMedian:
    """Median of the last `window` values; appending costs one insertion into a short sorted list.

    Args:
        window: Values remembered.

    Example:
        >>> median = WindowedMedian(3)
        >>> for value in (9.0, 1.0, 2.0, 3.0):
        ...     median.append(value)
        >>> median.median
        2.0
    """

    def __init__(self, window: int) -> None:
        self.window = window
        self._recent: deque[float] = deque()
        self._sorted: list[float] = []

    def __len__(self) -> int:
        return len(self._recent)

    def append(self, value: float) -> None:
        """Take in `value` and forget the oldest one if the window is full."""
        if len(self._recent) == self.window:
            del self._sorted[bisect_left(self._sorted, self._recent.popleft())]
        self._recent.append(value)
        insort(self._sorted, value)

    @property
    def median(self) -> float:
        """The middle value, or the mean of the two in the middle; there must be one value at least."""
        middle = len(self._sorted) // 2
        if len(self._sorted) % 2:
            return self._sorted[middle]
        return (self._sorted[middle - 1] + self._sorted[middle]) / 2

    def values(self) -> list[float]:
        """The remembered values, oldest first."""
        return list(self._recent)

    def replace(self, values: Iterable[float]) -> None:
        """Remember `values` instead, oldest first."""
        self._recent.clear()
        self._sorted.clear()
        for value in values:
            self.append(value)
