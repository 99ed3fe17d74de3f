"""Keep the median of the last values as values arrive and expire."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable


class WindowedMedian:
    """Keeps the median of the last `window` unexpired values, by insertion into a sorted list.

    Example:
        >>> median = WindowedMedian(3)
        >>> for time, value in enumerate((9.0, 1.0, 2.0, 3.0)):
        ...     median.append(time, value)
        >>> median.median
        2.0
    """

    def __init__(self, window: int) -> None:
        self.window = window
        self._recent: deque[tuple[int, float]] = deque()
        self._sorted: list[float] = []

    def __len__(self) -> int:
        return len(self._recent)

    def append(self, time: int, value: float) -> None:
        """Take in `value`, measured at `time`, and forget the oldest one if the window is full."""
        if len(self._recent) == self.window:
            self._forget_oldest()
        self._recent.append((time, value))
        insort(self._sorted, value)

    def expire(self, before: int) -> None:
        """Forget the values measured before that time."""
        while self._recent and self._recent[0][0] < before:
            self._forget_oldest()

    @property
    def median(self) -> float:
        """The middle value, or the mean of the two in the middle; there must be one value at least."""
        middle = len(self._sorted) // 2
        if len(self._sorted) % 2:
            return self._sorted[middle]
        return (self._sorted[middle - 1] + self._sorted[middle]) / 2

    def items(self) -> list[list[float]]:
        """Return the remembered [time, value], oldest first."""
        return [list(item) for item in self._recent]

    def replace(self, items: Iterable[Iterable[float]]) -> None:
        """Remember these [time, value] instead, oldest first."""
        self._recent.clear()
        self._sorted.clear()
        for time, value in items:
            self.append(int(time), value)

    def _forget_oldest(self) -> None:
        _, value = self._recent.popleft()
        del self._sorted[bisect_left(self._sorted, value)]
