"""The reward pool: raising, async and senseless reward functions."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
import time
from typing import Any

import pytest

from tlt_lightning.rewards import RewardPool, RewardTerm
from tlt_lightning.rewards.pool import MAX_AWAITED


def length(prompt: str, response: str, row: dict) -> float:
    return len(response)


async def async_length(prompt: str, response: str, row: dict) -> float:
    await asyncio.sleep(0)
    return len(response)


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


def test_what_a_reward_does_to_its_row_reaches_no_other_call(make_pool) -> None:
    def use_up(prompt: str, response: str, row: dict) -> float:
        return row["numbers"].pop() + row.pop("answer")

    pool, row = make_pool(use_up), {"numbers": [1, 2], "answer": 3}
    pool.submit(0, "p", "r", row)
    pool.submit(1, "p", "r", row)
    assert pool.collect() == {0: {"use_up": 5.0}, 1: {"use_up": 5.0}}
    assert row == {"numbers": [1, 2], "answer": 3}


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


def test_async_calls_share_an_event_loop_and_run_together(make_pool) -> None:
    client = asyncio.Barrier(8)  # as clients that keep connections do, it belongs to the loop that uses it first

    async def ask(prompt: str, response: str, row: dict) -> float:
        await client.wait()
        return 1.0

    for _ in range(2):  # pools, as `fit` and `validate` make theirs
        pool = make_pool(ask, num_workers=1, timeout=100)
        for key in range(8):
            pool.submit(key, "", "", {})
        assert pool.collect() == {key: {"ask": 1.0} for key in range(8)}
        pool.close()


def test_a_pool_that_closes_ends_its_own_async_calls_only(make_pool, caplog, recwarn) -> None:
    loops, is_begun, is_cancelled, may_end = set(), threading.Event(), threading.Event(), threading.Event()

    async def ask(prompt: str, response: str, row: dict) -> float:
        loops.add(asyncio.get_running_loop())
        try:
            while prompt == "endless" or not may_end.is_set():
                is_begun.set()
                await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            is_cancelled.set()
            raise
        return 1.0

    other, closes = make_pool(ask, timeout=100), make_pool(ask, timeout=100)
    other.submit(0, "", "", {})
    assert is_begun.wait(100)
    for key in range(MAX_AWAITED + 6):  # some wait for their turn, and are never begun
        closes.submit(key, "endless", "", {})
    while sum(call.task is not None for call in list(closes._running)) < MAX_AWAITED - 1:
        time.sleep(0.01)
    closes.close()
    assert is_cancelled.wait(100)
    may_end.set()
    assert other.collect() == {0: {"ask": 1.0}}
    later = make_pool(ask, timeout=100)
    later.submit(0, "", "", {})
    assert later.collect() == {0: {"ask": 1.0}}
    assert (len(loops), caplog.records, recwarn.list) == (1, [], [])


def test_pools_that_begin_together_make_one_event_loop(make_pool, monkeypatch: pytest.MonkeyPatch) -> None:
    made, new = [], asyncio.new_event_loop

    def make() -> asyncio.AbstractEventLoop:
        time.sleep(0.1)
        made.append(new())
        return made[-1]

    RewardPool._loop_thread = None
    monkeypatch.setattr(asyncio, "new_event_loop", make)
    pools = [make_pool(async_length) for _ in range(4)]
    for pool in pools:
        pool.submit(0, "", "abc", {})
    assert [pool.collect() for pool in pools] == [{0: {"async_length": 3.0}}] * 4
    assert len(made) == 1


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


def test_numbers_of_all_kinds_are_scores(make_pool) -> None:
    import numpy as np
    import torch

    for value in (True, 1, np.float32(1), torch.tensor([1.0])):
        pool = make_pool(RewardTerm(function=lambda p, r, row, v=value: v, name="one"))
        pool.submit(0, "", "", {})
        assert pool.collect() == {0: {"one": 1.0}}


def test_scores_that_nobody_asks_for_wait_and_hold_nobody_up(make_pool) -> None:
    may_end = threading.Event()

    def wait(prompt: str, response: str, row: dict) -> float:
        return float(may_end.wait(100)) if prompt == "slow" else 2.0

    pool = make_pool(wait, timeout=200)
    pool.submit(3, "slow", "", {})
    pool.submit(-4, "fast", "", {})
    assert pool.collect([-4]) == {-4: {"wait": 2.0}}
    assert (3 in pool, -4 in pool) == (True, False)
    may_end.set()
    assert pool.collect() == {3: {"wait": 1.0}}


def test_of_two_responses_with_one_key_the_newer_counts(make_pool) -> None:
    pool = make_pool(length)
    for text in ("longer", "new"):
        pool.submit(3, "", text, {})
    assert pool.collect([3]) == {3: {"length": 3.0}}


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"terms": [length, length]}, "`rewards` holds 2 of the name 'length'"),
        ({"timeout": float("nan")}, "`timeout` must be in"),
        ({"timeout": float("inf")}, "`timeout` must be in"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        RewardPool(**({"terms": [RewardTerm(function=length)]} | settings))


def test_a_reward_that_forks_leaves_no_copy_of_the_run(make_pool) -> None:
    children = []

    def fork(prompt: str, response: str, row: dict) -> float:
        if child := os.fork():
            children.append(child)
        return 1.0

    pool = make_pool(RewardTerm(function=fork))
    pool.submit(0, "p", "a", {})
    assert pool.collect() == {0: {"fork": 1.0}}
    end, ended = time.monotonic() + 100, 0
    while not ended and time.monotonic() < end:
        time.sleep(0.05)
        ended, _ = os.waitpid(children[0], os.WNOHANG)
    if not ended:
        os.kill(children[0], signal.SIGKILL)
    assert ended
