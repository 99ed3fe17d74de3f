import time
from collections.abc import Iterator

import pytest

from tests.support.two_workers import failure, two_workers
from tlt_lightning.data import liveness
from tlt_lightning.data.liveness import Liveness


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Liveness]]:
    monkeypatch.setattr(liveness, "_BEAT_SECONDS", 0.02)
    monkeypatch.setattr(liveness, "_SILENT_SECONDS", 0.5)
    with two_workers() as workers:
        yield workers


def test_a_slow_worker_is_waited_for(pair: list[Liveness]) -> None:
    assert failure(pair[0], seconds=1.2) == failure(pair[1], seconds=0.0) == "nothing was raised"


def test_the_error_of_one_worker_stops_the_other_and_says_what_it_was(pair: list[Liveness]) -> None:
    pair[1].report(ValueError("out of luck"))
    assert failure(pair[0]) == "The run cannot go on: rank 1 ended with ValueError: out of luck."


def test_a_worker_that_falls_silent_is_taken_for_dead(pair: list[Liveness]) -> None:
    time.sleep(0.1)
    pair[1].close()
    assert "rank 1 has given no sign of life" in failure(pair[0])


def test_the_end_of_the_worker_that_keeps_the_books_is_noticed(pair: list[Liveness]) -> None:
    time.sleep(0.1)
    pair[0].close()
    pair[0]._watch.join()
    del pair[0]._store  # closes the connection, as the end of its process does
    assert "rank 1 lost touch with rank 0" in failure(pair[1])
    pair[1]._failure = None  # had the window been the first to notice
    with pytest.raises(RuntimeError, match="lost touch with rank 0"):
        pair[1].count("finished", 1)
