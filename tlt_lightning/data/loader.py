"""The iterables that a RolloutDataModule gives the Trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item")


class RolloutLoader(Generic[Item]):
    """A sized, lazy iterable: rolling out begins with the first `next`, anew in each epoch.

    Sized, because Lightning prefetches one batch of an iterable without length, which would then be one update stale.
    Lazy, because Lightning calls `iter` before `on_train_start` and once more to look at the type.

    Args:
        length: How many items each pass yields.
        iterate: A generator function that yields them.
    """

    def __init__(self, length: int, iterate: Callable[[], Iterator[Item]]) -> None:
        self._length = length
        self._iterate = iterate

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Item]:
        yield from self._iterate()
