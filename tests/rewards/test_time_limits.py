"""The reward pool: functions that are late or hang, and the threads that they keep."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

from tlt_lightning.rewards import RewardPool, RewardTerm
from tlt_lightning.rewards import pool as pools
from tlt_lightning.rewards.pool import GRACE, MAX_STUCK, within

pytestmark = pytest.mark.slow

TIMEOUT = 0.5


class Clock:
    """Stands still but for calls that say how long they take: on a busy machine none is late by itself."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The pool's clock."""
    clock = Clock()
    monkeypatch.setattr(pools, "time", clock)
    return clock


def length(prompt: str, response: str, row: dict) -> float:
    return len(response)


def hang(prompt: str, response: str, row: dict) -> float:
    threading.Event().wait()
    return 1.0


async def hang_async(prompt: str, response: str, row: dict) -> float:
    await asyncio.Event().wait()
    return 1.0


def workers(before: set[threading.Thread]) -> list[threading.Thread]:
    return [thread for thread in set(threading.enumerate()) - before if thread.name == "reward-worker"]


@pytest.mark.parametrize("function", [hang, hang_async])
def test_hanging_calls_time_out_and_free_their_worker(function: Any, make_pool, clock: Clock, caplog) -> None:
    def begin(prompt: str, response: str, row: dict) -> Any:
        clock.now += TIMEOUT
        return function(prompt, response, row)

    pool = make_pool(RewardTerm(function=begin, name="hangs"), length, num_workers=1, timeout=TIMEOUT)
    for key in range(2):
        pool.submit(key, "", "abc", {})
    assert pool.collect() == {key: {"hangs": 0.0, "length": 3.0} for key in range(2)}
    assert pool.stats["reward/hangs_timeouts"] == 2
    assert pool.stats["reward/length_timeouts"] == 0
    assert f"no score within {TIMEOUT} s" in caplog.text
    assert "reward/hangs_timeouts" in caplog.text


def test_a_coroutine_that_blocks_its_loop_costs_no_call_that_has_not_begun(make_pool, clock: Clock, caplog) -> None:
    async def block(prompt: str, response: str, row: dict) -> float:
        if prompt == "blocks":
            clock.now += TIMEOUT + GRACE
            threading.Event().wait()
        return 1.0

    pool = make_pool(block, timeout=TIMEOUT)
    for key, prompt in enumerate(["blocks", "", ""]):
        pool.submit(key, prompt, "", {})
    assert pool.collect() == {0: {"block": 0.0}, 1: {"block": 1.0}, 2: {"block": 1.0}}
    assert pool.stats == {"reward/block_errors": 0, "reward/block_timeouts": 1}
    assert "is better a plain function" in caplog.text


def test_async_calls_that_compute_one_after_the_other_are_not_taken_for_one_that_blocks(
    make_pool, clock: Clock
) -> None:
    number = 2 * int(GRACE / TIMEOUT)
    all_wait = asyncio.Barrier(number)

    async def compute(prompt: str, response: str, row: dict) -> float:
        if prompt == "computes":
            await all_wait.wait()
            clock.now += TIMEOUT
            pool.submit(number, "", "", {})  # looks for late calls
        return 1.0

    pool = make_pool(compute, timeout=TIMEOUT)
    for key in range(number):
        pool.submit(key, "computes", "", {})
    assert set(map(str, pool.collect(range(number)).values())) == {"{'compute': 1.0}"}


def test_the_limit_of_an_awaitable_runs_little_while_others_block_the_loop() -> None:
    async def block() -> float:
        for _ in range(3):
            await asyncio.sleep(0)
            time.sleep(0.01)
        return 1.0

    async def score() -> list[float]:
        return await asyncio.gather(*(within(0.1, block(), TimeoutError()) for _ in range(16)))

    assert asyncio.run(score()) == [1.0] * 16


def test_calls_that_hang_hold_up_no_others_until_scores_are_waited_for(make_pool, clock: Clock) -> None:
    hangs, is_called = threading.Event(), threading.Event()

    def waiting(prompt: str, response: str, row: dict) -> float:
        if prompt == "hangs":
            hangs.set()
            threading.Event().wait()
        is_called.set()
        return 1.0

    pool = make_pool(waiting, num_workers=1, timeout=TIMEOUT)
    pool.submit(0, "hangs", "", {})
    assert hangs.wait(60)
    clock.now = TIMEOUT
    pool.submit(1, "", "", {})
    assert is_called.wait(20)


def test_hanging_calls_pile_up_to_a_limit_only() -> None:
    threads, released = threading.active_count(), threading.Event()
    pool = RewardPool([RewardTerm(function=lambda p, r, row: released.wait(), name="hangs")], timeout=0.001)

    def score_many() -> None:
        for key in range(2 * MAX_STUCK):
            pool.submit(key, "", "", {})
        pool.collect()

    with pytest.raises(RuntimeError, match=f"{MAX_STUCK} threads.*`hangs`"):
        score_many()
    assert threading.active_count() - threads <= MAX_STUCK + 8
    pool.close()
    released.set()


def test_calls_that_are_late_but_end_may_be_any_number(make_pool) -> None:
    pool = make_pool(
        RewardTerm(function=lambda p, r, row: time.sleep(0.02) or 1.0, name="late"), num_workers=1, timeout=0.002
    )
    for key in range(2 * MAX_STUCK):
        pool.submit(key, "", "", {})
    pool.collect()
    assert pool.stats["reward/late_timeouts"] == 2 * MAX_STUCK


def test_the_time_limit_counts_from_the_start_of_a_call(make_pool, clock: Clock) -> None:
    def pause(prompt: str, response: str, row: dict) -> float:
        clock.now += 0.6 * TIMEOUT
        return 1.0

    pool = make_pool(pause, num_workers=1, timeout=TIMEOUT)
    for key in range(8):
        pool.submit(key, "", "", {})
    assert pool.collect() == {key: {"pause": 1.0} for key in range(8)}


def test_a_cancelled_coroutine_can_clean_up(make_pool) -> None:
    cleaned = threading.Event()

    async def tidy(prompt: str, response: str, row: dict) -> float:
        try:
            await asyncio.Event().wait()
        finally:
            cleaned.set()
        return 1.0

    pool = make_pool(tidy, timeout=TIMEOUT)
    pool.submit(0, "", "", {})
    pool.collect()
    assert cleaned.wait(100)


def test_a_timeout_error_counts_as_a_timeout_without_costing_a_thread(make_pool) -> None:
    def gives_up(prompt: str, response: str, row: dict) -> float:
        raise TimeoutError("the judge is away")

    threads = threading.active_count()
    pool = make_pool(gives_up, num_workers=2)
    for key in range(20):
        pool.submit(key, "", "", {})
    pool.collect()
    assert pool.stats == {"reward/gives_up_errors": 0, "reward/gives_up_timeouts": 20}
    assert threading.active_count() - threads <= 4


def test_a_thread_that_was_given_up_ends_with_its_call(make_pool) -> None:
    released = threading.Event()

    def late(prompt: str, response: str, row: dict) -> float:
        released.wait(100)
        return 1.0

    threads = set(threading.enumerate())
    pool = make_pool(late, num_workers=2, timeout=0.1)
    for key in range(8):
        pool.submit(key, "", "", {})
    assert {score["late"] for score in pool.collect().values()} == {0.0}
    assert len(workers(threads)) == 10
    released.set()
    while len(workers(threads)) > 2:
        time.sleep(0.01)


def test_functions_that_load_do_so_before_the_first_call(make_pool, clock: Clock) -> None:
    class Loads:
        loaded = False

        def load(self) -> None:
            clock.now += 1.2 * TIMEOUT
            self.loaded = True

        def __call__(self, prompt: str, response: str, row: dict) -> float:
            return float(self.loaded)

    pool = make_pool(Loads(), timeout=TIMEOUT)
    pool.submit(0, "", "", {})
    assert pool.collect() == {0: {"Loads": 1.0}}


def test_close_is_idempotent_final_and_ends_all_threads() -> None:
    threads = set(threading.enumerate())
    pool = RewardPool([RewardTerm(function=hang_async), RewardTerm(function=length)], timeout=1)
    pool.submit(0, "", "", {})
    time.sleep(0.1)
    pool.close()
    pool.close()
    with pytest.raises(RuntimeError, match="closed"):
        pool.submit(1, "", "", {})
    deadline = time.monotonic() + 100
    while (left := workers(threads)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not left


def test_what_close_gives_up_on_is_no_failure(caplog) -> None:
    threads = set(threading.enumerate())
    for _ in range(20):
        pool = RewardPool([RewardTerm(function=hang_async)], timeout=2)
        for key in range(4):
            pool.submit(key, "", "", {})
        time.sleep(0.005)
        pool.close()
    for thread in workers(threads):
        thread.join(100)
    assert not caplog.records


@pytest.mark.parametrize("collect", [True, False])
def test_stuck_calls_do_not_keep_the_interpreter(collect: bool) -> None:
    code = f"""
import asyncio, threading
from tlt_lightning.rewards import RewardPool, RewardTerm
from tlt_lightning.rewards.pool import MAX_STUCK
def hang(prompt, response, row):
    threading.Event().wait()
async def hang_async(prompt, response, row):
    await asyncio.Event().wait()
pool = RewardPool([RewardTerm(function=hang), RewardTerm(function=hang_async)], timeout=0.2)
for key in range(3):
    pool.submit(key, "", "", {{}})
if {collect}:
    pool.collect()
print("end")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stdout) == (0, "end\n")
    assert "Traceback" not in done.stderr
