import time

import pytest

from tlt_lightning.timing import LapClock


def test_laps_leave_no_gap() -> None:
    started = time.perf_counter()
    clock = LapClock()
    for stage, seconds in (("a", 0.02), ("b", 0.01), ("a", 0.01)):
        time.sleep(seconds)
        clock.lap(stage)
    total = time.perf_counter() - started
    laps = clock.read()
    assert sum(laps.values()) == pytest.approx(total, abs=0.005)
    assert laps["a"] > laps["b"]


def test_reading_starts_over() -> None:
    clock = LapClock()
    clock.lap("a")
    clock.read()
    assert clock.read() == {}
