"""Calls beside the engine: threads that serve again, and what counts as late."""

import asyncio
import gc
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from tlt_lightning.environments.workers import EnvironmentWorkers


def results(workers: EnvironmentWorkers, number: int) -> dict[int, Any]:
    """Wait for so many jobs."""
    ended: dict[int, Any] = {}
    while len(ended) < number:
        ended |= dict(workers.take(wait=True))
    return ended


def test_threads_serve_one_call_after_the_other_and_end_with_the_workers() -> None:
    workers, before = EnvironmentWorkers(200.0), threading.active_count()
    for key in range(50):
        workers.submit(key, workers.call(threading.current_thread))
        time.sleep(0.002)
    assert len({*results(workers, 50).values()}) < 10
    workers.close()
    workers.submit(50, workers.call(lambda: "again"))  # as after a loop that was given up
    assert results(workers, 1) == {50: "again"}
    workers.close()
    for _ in range(1000):
        if threading.active_count() <= before:
            break
        time.sleep(0.1)
    assert threading.active_count() <= before


def test_an_answer_that_came_in_time_counts_though_the_loop_was_busy() -> None:
    workers = EnvironmentWorkers(1.0)
    loop_is_held, has_answered = threading.Event(), threading.Event()

    async def hold_up() -> None:
        loop_is_held.set()
        has_answered.wait(100)
        time.sleep(1.5)

    def answer() -> str:
        loop_is_held.wait(100)
        has_answered.set()
        return "in time"

    async def job(method: Callable[..., Any]) -> Any:
        return await workers.call(method)

    workers.submit(0, job(answer))
    workers.submit(1, job(hold_up))
    assert results(workers, 2)[0] == "in time"
    workers.close()


def test_what_is_under_way_at_the_end_is_given_up_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    workers, is_over = EnvironmentWorkers(200.0), threading.Event()
    for key, method in enumerate((is_over.wait, lambda: asyncio.sleep(200))):
        workers.submit(key, workers.call(method))
    time.sleep(0.2)
    loop = workers._loop
    workers.close()
    assert loop is not None
    for _ in range(1000):
        if loop.is_closed():
            break
        time.sleep(0.1)
    assert loop.is_closed()
    is_over.set()
    gc.collect()
    assert caplog.text == ""  # no task is destroyed while it is pending


def test_a_call_that_hangs_leaves_its_thread_to_itself() -> None:
    workers, is_over = EnvironmentWorkers(0.2), threading.Event()
    workers.submit(0, workers.call(is_over.wait, 200))
    assert "no answer within" in str(results(workers, 1)[0])
    workers.seconds = 200
    workers.submit(1, workers.call(lambda: 1))
    assert results(workers, 1) == {1: 1}
    (stuck,) = workers._stuck
    assert not stuck.is_set()
    is_over.set()
    assert stuck.wait(100)
    workers.close()
