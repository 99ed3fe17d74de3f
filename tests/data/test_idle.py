"""Two workers' coordinators in one process."""

import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from tlt_lightning.data import idle
from tlt_lightning.data.idle import IdleCoordinator


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[IdleCoordinator]]:
    monkeypatch.setattr(idle, "_BEAT_SECONDS", 0.02)
    monkeypatch.setattr(idle, "_SILENT_SECONDS", 0.5)
    told: list[int] = []

    def broadcast(port: int) -> int:
        told.append(port)
        return told[0]

    strategy = SimpleNamespace(broadcast=broadcast)
    coordinators = [
        IdleCoordinator(SimpleNamespace(world_size=2, global_rank=rank, is_global_zero=rank == 0, strategy=strategy))  # type: ignore[arg-type]
        for rank in (0, 1)
    ]
    yield coordinators
    for coordinator in coordinators:
        coordinator.close()


def failure(coordinator: IdleCoordinator, seconds: float = 5.0) -> str:
    """What `check` raises, once it does."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            coordinator.check()
        except RuntimeError as error:
            return str(error)
        time.sleep(0.01)
    return "nothing was raised"


def test_the_window_of_the_first_is_open_until_the_last_is_done(pair: list[IdleCoordinator]) -> None:
    for _ in range(2):
        with pair[1].window() as early:
            assert early.is_open()
            assert early.num_waiting_for == 1
            with pair[0].window() as late:
                assert not late.is_open()
                assert late.num_waiting_for == 0
            assert not early.is_open()


def test_a_slow_worker_is_waited_for(pair: list[IdleCoordinator]) -> None:
    assert failure(pair[0], seconds=1.2) == failure(pair[1], seconds=0.0) == "nothing was raised"


def test_the_error_of_one_worker_stops_the_other_and_says_what_it_was(pair: list[IdleCoordinator]) -> None:
    pair[1].report(ValueError("out of luck"))
    assert failure(pair[0]) == "The run cannot go on: rank 1 ended with ValueError: out of luck."
    with pytest.raises(RuntimeError, match="out of luck"), pair[0].window():
        pass


def test_a_worker_that_falls_silent_is_taken_for_dead(pair: list[IdleCoordinator]) -> None:
    time.sleep(0.1)
    pair[1].close()
    assert "rank 1 has given no sign of life" in failure(pair[0])


def test_the_end_of_the_worker_that_keeps_the_books_is_noticed(pair: list[IdleCoordinator]) -> None:
    time.sleep(0.1)
    pair[0].close()
    pair[0]._watch.join()
    del pair[0]._store  # closes the connection, as the end of its process does
    assert "rank 1 lost touch with rank 0" in failure(pair[1])
    pair[1]._failure = None  # had the window been the first to notice
    with pytest.raises(RuntimeError, match="lost touch with rank 0"), pair[1].window():
        pass
