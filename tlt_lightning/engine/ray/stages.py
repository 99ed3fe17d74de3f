"""Book the seconds of an engine host to one stage after the other."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


class StageClock:
    """Books what passes to the stage of now; read by any thread.

    Args:
        stage: The first, and the one outside all others.
    """

    def __init__(self, stage: str) -> None:
        self._lock = threading.Lock()
        self._stage, self._since = stage, time.perf_counter()
        self._laps: list[tuple[str, float]] = []

    @contextmanager
    def within(self, stage: str) -> Iterator[None]:
        """Book what is done meanwhile to `stage`, then again to that before it."""
        before = self._stage
        self._enter(stage)
        try:
            yield
        finally:
            self._enter(before)

    def take(self) -> list[tuple[str, float]]:
        """Return stages and seconds since the last call, up to now."""
        with self._lock:
            self._book()
            laps, self._laps = self._laps, []
        return laps

    def _enter(self, stage: str) -> None:
        with self._lock:
            self._book()
            self._stage = stage

    def _book(self) -> None:
        now = time.perf_counter()
        self._laps.append((self._stage, now - self._since))
        self._since = now
