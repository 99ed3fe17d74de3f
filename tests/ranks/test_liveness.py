import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection

import pytest
from lightning.pytorch.utilities.exceptions import SIGTERMException

from tests.support.two_workers import failure, make_trainers, two_workers
from tlt_lightning.ranks import liveness
from tlt_lightning.ranks.liveness import Liveness

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "_BEAT_SECONDS", 0.02)
    monkeypatch.setattr(liveness, "_STALLED_SECONDS", 0.3)


@pytest.fixture
def pair() -> Iterator[list[Liveness]]:
    with two_workers() as workers:
        yield workers


@pytest.fixture
def forked() -> Iterator[tuple[Liveness, int]]:
    """This process as rank 0, and the process id of rank 1."""
    here, there = multiprocessing.Pipe()
    trainers = make_trainers()
    child = multiprocessing.get_context("fork").Process(target=be_rank_one, args=(trainers[1], there))
    child.start()
    trainers[0].strategy.broadcast = here.send
    worker = Liveness(trainers[0])
    assert child.pid is not None
    yield worker, child.pid
    worker.close()
    child.kill()
    child.join()


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 100
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def be_rank_one(trainer: object, port: Connection) -> None:
    workers: list[Liveness] = []
    signal.signal(signal.SIGTERM, lambda *_: workers[0].terminate())  # before the other knows of this one
    trainer.strategy.broadcast = lambda _: port.recv()  # type: ignore[attr-defined]
    workers.append(Liveness(trainer))  # type: ignore[arg-type]
    time.sleep(200)


def be_stuck(trainer: object, port: Connection) -> None:
    liveness._GRACE_SECONDS = 0.1
    be_rank_one(trainer, port)


def test_a_worker_that_never_looks_is_ended_once_another_has_failed() -> None:
    here, there = multiprocessing.Pipe()
    trainers = make_trainers()
    child = multiprocessing.get_context("fork").Process(target=be_stuck, args=(trainers[1], there))
    child.start()
    trainers[0].strategy.broadcast = here.send
    worker = Liveness(trainers[0])
    worker.report(ValueError("out of luck"))
    child.join(100)  # seconds; it would sleep for 200
    worker.close()
    assert child.exitcode == 1


def test_a_slow_worker_is_waited_for(pair: list[Liveness]) -> None:
    assert failure(pair[0], seconds=0.6) == failure(pair[1], seconds=0.0) == "nothing was raised"


@pytest.mark.parametrize("ending", [0, 1])
def test_the_error_of_one_worker_stops_the_other_and_says_what_it_was(pair: list[Liveness], ending: int) -> None:
    pair[ending].report(ValueError("out of luck"))
    expected = f"The run cannot go on: rank {ending} ended with ValueError: out of luck."
    assert failure(pair[1 - ending]) == expected


def test_a_killed_worker_is_named_without_waiting_for_its_silence(forked: tuple[Liveness, int]) -> None:
    worker, pid = forked
    os.kill(pid, signal.SIGKILL)
    expected = "The run cannot go on: rank 1 has died: its process ended without a word."
    assert failure(worker) == expected


def test_a_stopped_worker_is_taken_for_dead(forked: tuple[Liveness, int], monkeypatch: pytest.MonkeyPatch) -> None:
    worker, pid = forked
    monkeypatch.setattr(liveness, "_SILENT_SECONDS", 0.5)
    os.kill(pid, signal.SIGSTOP)
    assert "rank 1 has given no sign of life" in failure(worker)


def test_a_worker_that_left_in_good_order_is_not_missed(pair: list[Liveness]) -> None:
    pair[1].close()
    assert failure(pair[0], seconds=0.3) == "nothing was raised"


def test_a_worker_that_is_alive_without_getting_on_is_named(caplog: pytest.LogCaptureFixture) -> None:
    with two_workers(patience=0.5) as workers:
        workers[1].check()  # and never again, while the other waits in its window
        assert "rank 1 is alive, but has not got on for" in failure(workers[0])
    with two_workers() as workers, caplog.at_level(logging.WARNING):
        workers[1].check()
        while "Rank 1 is alive" not in caplog.text:
            assert failure(workers[0], seconds=0.1) == "nothing was raised"


def test_workers_that_all_wait_for_each_other_are_ended(caplog: pytest.LogCaptureFixture) -> None:
    with two_workers(patience=0.5) as workers:
        for worker in workers:
            worker.check()
        wait_for(lambda: "is alive, but has not got on for" in caplog.text)


def test_sigterm_ends_a_worker_that_waits_for_ever(pair: list[Liveness], monkeypatch: pytest.MonkeyPatch) -> None:
    statuses: list[int] = []
    monkeypatch.setattr(liveness, "_TERM_SECONDS", 0.1)
    monkeypatch.setattr(liveness.os, "_exit", statuses.append)
    pair[1].terminate()
    wait_for(lambda: 143 in statuses)


def test_sigterm_ends_this_worker_where_it_is_free_and_only_then_the_other(pair: list[Liveness]) -> None:
    pair[1].terminate()
    pair[1].check(is_free=False)
    assert failure(pair[0], seconds=0.5) == "nothing was raised"  # an update that has begun needs it
    with pytest.raises(SIGTERMException) as raised:
        pair[1].check()
    assert raised.value.code == 143
    pair[1].report(raised.value)
    assert failure(pair[0]) == "The run cannot go on: rank 1 ended with SIGTERM."


def test_sigterm_does_not_end_a_worker_that_gets_on_with_what_must_be_finished(
    pair: list[Liveness], monkeypatch: pytest.MonkeyPatch
) -> None:
    ended_at: list[float] = []
    monkeypatch.setattr(liveness, "_TERM_SECONDS", 0.1)
    monkeypatch.setattr(liveness.os, "_exit", lambda _: ended_at.append(time.monotonic()))
    pair[1]._last_check = last_look = time.monotonic() + 1.0
    pair[1].terminate()
    wait_for(lambda: bool(ended_at))
    assert ended_at[0] > last_look


def test_an_error_is_passed_on_by_a_worker_that_ends_by_sigterm_itself() -> None:
    with two_workers(num_ranks=3) as workers:
        workers[0].terminate()
        wait_for(lambda: workers[2]._lines[0].terminated)
        workers[1].report(ValueError("out of luck"))
        assert failure(workers[2]) == "The run cannot go on: rank 1 ended with ValueError: out of luck."
        with pytest.raises(SIGTERMException):
            workers[0].check()


def test_a_worker_killed_behind_its_sigterm_is_said_to_have_ended_by_it(forked: tuple[Liveness, int]) -> None:
    worker, pid = forked
    os.kill(pid, signal.SIGTERM)
    wait_for(lambda: worker._lines[1].terminated)
    os.kill(pid, signal.SIGKILL)
    assert failure(worker) == "The run cannot go on: rank 1 ended with SIGTERM."


def test_an_error_of_a_collective_is_followed_by_the_reason(forked: tuple[Liveness, int]) -> None:
    worker, pid = forked
    os.kill(pid, signal.SIGKILL)
    error = RuntimeError("Connection closed by peer")
    worker.report(error)
    assert error.__notes__ == ["The run cannot go on: rank 1 has died: its process ended without a word."]


LEAVE = """
import sys
from types import SimpleNamespace
from tlt_lightning.ranks.liveness import Liveness

strategy = SimpleNamespace(broadcast=lambda _: int(sys.argv[1]))
worker = Liveness(SimpleNamespace(global_rank=1, world_size=2, strategy=strategy))
"""


def test_a_process_that_ends_without_the_end_of_its_run_is_missed() -> None:
    trainers = make_trainers()
    trainers[0].strategy.broadcast = lambda port: subprocess.Popen([sys.executable, "-c", LEAVE, str(port)])
    worker = Liveness(trainers[0])
    assert failure(worker) == "The run cannot go on: rank 1 has died: its process ended without a word."
    worker.close()


EXIT = """
import atexit, threading
from types import SimpleNamespace
from tlt_lightning.ranks import liveness

atexit.register(threading.Event().wait, 60)  # as NCCL waits for a rank that never answers
liveness._GRACE_SECONDS = 1
alive = liveness.Liveness(SimpleNamespace(global_rank=0, world_size=1, strategy=None))
alive._failure = "rank 1 has given no sign of life"
alive.close()
"""


def test_a_process_that_knows_of_a_failure_gets_through_its_exit() -> None:
    ended = subprocess.run([sys.executable, "-c", EXIT], timeout=100)
    assert ended.returncode == -signal.SIGALRM
