"""Stages of an engine host, as another thread reads them."""

import threading
from collections.abc import Callable
from typing import Any

from tlt_lightning.engine.ray.stages import StageClock


class Overtaken:
    """A lock that lets something else in before whoever asks first."""

    def __init__(self, first: Callable[[], Any]) -> None:
        self.first, self.lock = [first], threading.Lock()

    def __enter__(self) -> None:
        if self.first:
            self.first.pop()()
        self.lock.acquire()

    def __exit__(self, *_: object) -> None:
        self.lock.release()


def test_a_stage_that_begins_while_laps_are_taken_goes_on() -> None:
    clock = StageClock("waiting")
    writing = clock.within("writing")
    clock._lock = Overtaken(writing.__enter__)  # type: ignore[assignment]
    assert [stage for stage, _ in clock.take()] == ["waiting", "writing"]
    assert [stage for stage, _ in clock.take()] == ["writing"]
