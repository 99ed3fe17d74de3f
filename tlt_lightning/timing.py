"""Where an iteration's wall-clock time went."""

from __future__ import annotations

import time


class LapClock:
    """Splits time into named stages without gaps: each lap takes all the time since the previous one.

    Stages therefore add up to the whole by construction.

    Example:
        >>> clock = LapClock()
        >>> _ = clock.lap("rollout")
        >>> sorted(clock.read())
        ['rollout']
    """

    def __init__(self) -> None:
        self._last = time.perf_counter()
        self._seconds: dict[str, float] = {}

    def lap(self, stage: str) -> float:
        """Charge the time since the last lap to `stage`; return those seconds."""
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        self._seconds[stage] = self._seconds.get(stage, 0.0) + seconds
        return seconds

    def seconds(self, stage: str) -> float:
        """Seconds charged to `stage` since the last `read`."""
        return self._seconds.get(stage, 0.0)

    def read(self) -> dict[str, float]:
        """Return the seconds by stage since the last `read`, and start over."""
        seconds, self._seconds = self._seconds, {}
        return seconds
