"""The reward pool: slow, hanging, raising, async and senseless reward functions."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tlt_lightning.rewards import RewardPool, RewardTerm
from tlt_lightning.rewards.pool import MAX_STUCK

TIMEOUT = 0.5
"""Long enough for a loaded machine to end a call that does nothing, short enough to wait for."""


@pytest.fixture
def make_pool() -> Iterator[Any]:
    pools: list[RewardPool] = []

    def make(*functions: Any, **settings: Any) -> RewardPool:
        terms = [f if isinstance(f, RewardTerm) else RewardTerm(function=f) for f in functions]
        pools.append(RewardPool(terms, **settings))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def length(prompt: str, response: str, row: dict) -> float:
    return len(response)


async def async_length(prompt: str, response: str, row: dict) -> float:
    await asyncio.sleep(0)
    return len(response)


def hang(prompt: str, response: str, row: dict) -> float:
    threading.Event().wait()
    return 1.0


async def hang_async(prompt: str, response: str, row: dict) -> float:
    await asyncio.Event().wait()
    return 1.0


def test_scores_come_by_key_and_name_unweighted(make_pool) -> None:
    pool = make_pool(RewardTerm(function=length, weight=0.1), async_length)
    pool.submit(7, "p", "abc", {})
    pool.submit(2, "p", "a", {})
    assert pool.collect() == {2: {"length": 1.0, "async_length": 1.0}, 7: {"length": 3.0, "async_length": 3.0}}
    assert pool.stats == {f"reward/{n}_{k}": 0 for n in ("length", "async_length") for k in ("errors", "timeouts")}
    assert pool.collect() == {}
    pool.submit(7, "p", "", {})
    assert pool.collect() == {7: {"length": 0.0, "async_length": 0.0}}


def test_functions_see_prompt_response_and_row(make_pool) -> None:
    seen: list[Any] = []

    def look(prompt: str, response: str, row: dict) -> float:
        seen.extend([prompt, response, row])
        return 0

    pool = make_pool(look)
    pool.submit(0, "p", "r", {"answer": 1})
    pool.collect()
    assert seen == ["p", "r", {"answer": 1}]


def test_order_does_not_depend_on_timing(make_pool) -> None:
    def last_first(prompt: str, response: str, row: dict) -> float:
        time.sleep(0.05 / (1 + row["n"]))
        return row["n"]

    pool = make_pool(last_first, length, num_workers=8)
    for n in (5, 3, 0, 4, 1, 2):
        pool.submit(n, "", "", {"n": n})
    scores = pool.collect()
    assert list(scores) == [0, 1, 2, 3, 4, 5]
    assert all(list(score.items()) == [("last_first", n), ("length", 0.0)] for n, score in scores.items())


def test_submit_returns_at_once_and_calls_run_in_parallel(make_pool) -> None:
    together = threading.Barrier(3)

    def meet(prompt: str, response: str, row: dict) -> float:
        together.wait(100)
        return 1

    pool = make_pool(meet, num_workers=3, timeout=200)
    for key in range(3):
        pool.submit(key, "", "", {})  # had it to wait for the call, the other two would not come
    assert pool.collect() == {key: {"meet": 1.0} for key in range(3)}


def test_calls_run_before_collect(make_pool) -> None:
    ran = threading.Event()
    pool = make_pool(RewardTerm(function=lambda p, r, row: ran.set() or 1.0, name="early"))
    pool.submit(0, "", "", {})
    assert ran.wait(100)


def test_no_more_calls_at_once_than_workers(make_pool) -> None:
    lock, pairs = threading.Lock(), threading.Barrier(2)
    running, most = 0, 0

    def count(prompt: str, response: str, row: dict) -> float:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        pairs.wait(100)
        with lock:
            running -= 1
        return 0

    pool = make_pool(count, num_workers=2, timeout=200)
    for key in range(10):
        pool.submit(key, "", "", {})
    pool.collect()
    assert most == 2


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def bad_functions() -> list[Any]:
    def raises(prompt: str, response: str, row: dict) -> float:
        raise KeyError("answer")

    def stops(prompt: str, response: str, row: dict) -> float:
        return next(iter([]))

    def exits(prompt: str, response: str, row: dict) -> float:
        sys.exit(1)

    def unprintable(prompt: str, response: str, row: dict) -> float:
        raise Unprintable

    async def exits_async(prompt: str, response: str, row: dict) -> float:
        sys.exit(1)

    async def cancels(prompt: str, response: str, row: dict) -> float:
        raise asyncio.CancelledError

    values = {"nan": float("nan"), "infinite": float("inf"), "text": "1.0", "nothing": None, "several": [1.0]}
    terms = [RewardTerm(function=lambda p, r, row, v=v: v, name=name) for name, v in values.items()]
    return [raises, stops, exits, unprintable, exits_async, cancels, *terms]


@pytest.mark.parametrize("function", bad_functions(), ids=lambda f: getattr(f, "name", None) or f.__name__)
def test_a_bad_function_is_counted_logged_and_scored(function: Any, make_pool, caplog) -> None:
    pool = make_pool(function, length, num_workers=1)
    name = pool.terms[0].name
    with caplog.at_level(logging.WARNING):
        for key in range(3):
            pool.submit(key, "the prompt", "long " * 1000, {})
        assert pool.collect() == {key: {name: 0.0, "length": 5000.0} for key in range(3)}
    assert pool.stats[f"reward/{name}_errors"] == 3
    assert pool.stats[f"reward/{name}_timeouts"] == 0
    (record,) = caplog.records
    assert f"Reward `{name}` failed" in record.getMessage()
    assert "the prompt" in record.getMessage()
    assert len(record.getMessage()) < 2000
    pool.collect()
    assert pool.stats[f"reward/{name}_errors"] == 0


def broken_row(prompt: str, response: str, row: dict) -> float:
    return row["ground_truth"]


async def broken_row_async(prompt: str, response: str, row: dict) -> float:
    await asyncio.sleep(0)
    return broken_row(prompt, response, row)


@pytest.mark.parametrize("function", [broken_row, broken_row_async])
def test_the_warning_says_in_which_line_a_reward_failed(function: Any, make_pool, caplog) -> None:
    pool = make_pool(function)
    pool.submit(0, "", "", {})
    pool.collect()
    assert "KeyError: 'ground_truth', in " in caplog.text
    assert f"in broken_row at {__file__}:{broken_row.__code__.co_firstlineno + 1}" in caplog.text
    assert f"in {function.__name__} at {__file__}:" in caplog.text
    assert "asyncio" not in caplog.text


def test_what_none_means_elsewhere_is_said(make_pool, caplog) -> None:
    pool = make_pool(RewardTerm(function=lambda p, r, row: None, name="none"))
    pool.submit(0, "", "", {})
    pool.collect()
    assert "returned None; return 0.0 where a reward does not apply" in caplog.text


@pytest.mark.parametrize(("value", "weight"), [(1e308, 1.0), (-1e39, 0.0), (1e10, 1e10)])
def test_scores_that_float32_cannot_learn_from_are_errors(value: float, weight: float, make_pool, caplog) -> None:
    pool = make_pool(RewardTerm(function=lambda p, r, row: value, name="huge", weight=weight))
    pool.submit(0, "", "", {})
    assert pool.collect() == {0: {"huge": 0.0}}
    assert pool.stats["reward/huge_errors"] == 1
    assert "beyond 1e+16" in caplog.text


def test_a_reward_that_scores_no_response_ends_the_run_with_its_error(make_pool) -> None:
    pool = make_pool(broken_row, length)
    for iteration in range(2):
        pool.submit(0, "one row may be broken", "", {})
        pool.submit(1, "one row may be broken", "", {})
        pool.submit(2, "another prompt", "", {"ground_truth": 1} if iteration == 0 else {})
        pool.collect()
        if iteration == 0:
            pool.check()
    error = r"`broken_row` scored none of the last 3 responses.*'ground_truth', in broken_row at .*test_pool.py:\d+"
    with pytest.raises(RuntimeError, match=error):
        pool.check()


def test_one_prompt_that_cannot_be_scored_ends_no_run_by_itself(make_pool) -> None:
    pool = make_pool(broken_row)
    for prompt in ("p", "p", "q"):
        pool.submit(0, prompt, "", {})
        pool.submit(1, prompt, "", {})
        pool.collect()
        if prompt == "p":
            pool.check()
    with pytest.raises(RuntimeError, match="none of the last 6 responses"):
        pool.check()


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
    pool = make_pool(RewardTerm(function=lambda p, r, row: time.sleep(0.02) or 1.0, name="late"), timeout=0.002)
    for key in range(2 * MAX_STUCK):
        pool.submit(key, "", "", {})
    pool.collect()
    assert pool.stats["reward/late_timeouts"] == 2 * MAX_STUCK


def test_numbers_of_all_kinds_are_scores(make_pool) -> None:
    import numpy as np
    import torch

    for value in (True, 1, np.float32(1), torch.tensor([1.0])):
        pool = make_pool(RewardTerm(function=lambda p, r, row, v=value: v, name="one"))
        pool.submit(0, "", "", {})
        assert pool.collect() == {0: {"one": 1.0}}


async def block_the_loop(prompt: str, response: str, row: dict) -> float:
    threading.Event().wait()
    return 1.0


@pytest.mark.parametrize("function", [hang, hang_async, block_the_loop])
def test_hanging_calls_time_out_and_free_their_worker(function: Any, make_pool, caplog) -> None:
    pool = make_pool(function, length, num_workers=1, timeout=TIMEOUT)
    for key in range(2):
        pool.submit(key, "", "abc", {})
    assert pool.collect() == {key: {function.__name__: 0.0, "length": 3.0} for key in range(2)}
    assert pool.stats[f"reward/{function.__name__}_timeouts"] == 2
    assert pool.stats["reward/length_timeouts"] == 0
    assert f"no score within {TIMEOUT} s" in caplog.text
    assert f"reward/{function.__name__}_timeouts" in caplog.text


def test_a_coroutine_that_blocks_its_thread_holds_up_no_other(make_pool) -> None:
    async def block_if_told(prompt: str, response: str, row: dict) -> float:
        if row["block"]:
            threading.Event().wait()
        return 1.0

    pool = make_pool(block_if_told, timeout=TIMEOUT)
    pool.submit(0, "", "", {"block": True})
    assert pool.collect() == {0: {"block_if_told": 0.0}}
    time.sleep(1)
    pool.submit(1, "", "", {"block": False})
    assert pool.collect() == {1: {"block_if_told": 1.0}}


def test_the_time_limit_counts_from_the_start_of_a_call(make_pool) -> None:
    def pause(prompt: str, response: str, row: dict) -> float:
        time.sleep(0.15)
        return 1.0

    pool = make_pool(pause, num_workers=1, timeout=1)
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

    def workers() -> list[threading.Thread]:
        return [thread for thread in set(threading.enumerate()) - threads if thread.name == "reward-worker"]

    threads = set(threading.enumerate())
    pool = make_pool(late, num_workers=2, timeout=0.1)
    for key in range(8):
        pool.submit(key, "", "", {})
    assert {score["late"] for score in pool.collect().values()} == {0.0}
    assert len(workers()) == 10
    released.set()
    while len(workers()) > 2:
        time.sleep(0.01)


def test_functions_that_load_do_so_before_the_first_call(make_pool) -> None:
    class Loads:
        loaded = False

        def load(self) -> None:
            time.sleep(1.2 * TIMEOUT)
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
    while (left := set(threading.enumerate()) - threads) and time.monotonic() < deadline:
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
    for thread in set(threading.enumerate()) - threads:
        thread.join(100)
    assert not caplog.records


def test_a_key_is_used_once(make_pool) -> None:
    pool = make_pool(length)
    pool.submit(3, "", "", {})
    with pytest.raises(ValueError, match="`key` 3 was submitted already"):
        pool.submit(3, "", "", {})


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"terms": []}, "`terms` must hold at least one"),
        ({"terms": [RewardTerm(function=length)] * 2}, "`terms` must have different names"),
        ({"num_workers": 0}, "`num_workers` must be at least 1"),
        ({"timeout": 0.0}, "`timeout` must be a positive"),
        ({"timeout": float("nan")}, "`timeout` must be a positive"),
        ({"timeout": float("inf")}, "`timeout` must be a positive"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        RewardPool(**({"terms": [RewardTerm(function=length)]} | settings))


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
