"""Measure the most memory that a stage of an iteration holds."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


class PeakMemory:
    """Measures the most bytes that this process has held on its GPU since the last `take`.

    PyTorch still counts the tensors of a sleeping engine, whose memory is unmapped; after `followed` they are left out.
    """

    def __init__(self) -> None:
        self._most, self._unmapped = 0.0, 0.0

    @property
    def _is_measured(self) -> bool:  # asking would claim memory of a GPU that the run does not use
        return torch.cuda.is_available() and torch.cuda.is_initialized()

    def take(self) -> float | None:
        """Return the peak since the last call, None without a GPU."""
        self._note()
        if not self._is_measured:
            return None
        most, self._most = self._most, 0.0
        return most

    @contextmanager
    def followed(self, unmapped: Callable[[], float]) -> Iterator[None]:
        """Follow an engine that falls asleep or wakes in the block; `unmapped` returns its bytes that are unmapped."""
        yield
        self._note()
        self._unmapped = unmapped()

    def _note(self) -> None:
        if not self._is_measured:
            return
        self._most = max(self._most, torch.cuda.max_memory_allocated() - self._unmapped)
        torch.cuda.reset_peak_memory_stats()
