"""Who takes Ctrl-C; what a run does then is in tests/runs/test_interruption.py."""

import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import Queue
from types import SimpleNamespace
from typing import Any

import pytest

from tlt_lightning.guard.interruption import NOTE, Interruption


@pytest.fixture
def interruption() -> Iterator[tuple[Interruption, list[str]]]:
    """One that notes what it tells, on a process as Python starts it."""
    told: list[str] = []
    liveness: Any = SimpleNamespace(interrupt=lambda: told.append("interrupted"))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield Interruption(liveness), told
    signal.signal(signal.SIGINT, before)


def test_a_thread_that_may_take_no_signals_takes_none(interruption: tuple[Interruption, list[str]]) -> None:
    taker, told = interruption
    with ThreadPoolExecutor(1) as thread:
        thread.submit(taker.listen).result()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        taker.listen()
        thread.submit(taker.give_back).result()
    signal.raise_signal(signal.SIGINT)
    assert told == ["interrupted"]


def test_a_handler_of_somebody_else_is_neither_taken_nor_given_back(
    interruption: tuple[Interruption, list[str]],
) -> None:
    taker, _ = interruption

    def hear(number: int, _: Any) -> None: ...

    signal.signal(signal.SIGINT, hear)
    taker.listen()
    taker.give_back()
    assert signal.getsignal(signal.SIGINT) is hear


def test_a_process_without_a_stderr_is_interrupted_all_the_same(
    interruption: tuple[Interruption, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    taker, told = interruption
    monkeypatch.setattr(sys, "stderr", None)
    taker.listen()
    signal.raise_signal(signal.SIGINT)
    assert told == ["interrupted"]
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_a_note_goes_where_bars_put_it_above_themselves(
    interruption: tuple[Interruption, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    said: Queue[str] = Queue()
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(write=said.put))  # as Rich replaces it
    interruption[0].listen()
    signal.raise_signal(signal.SIGINT)
    assert said.get(timeout=100) == NOTE
