import threading
import time

import pytest

from tlt_lightning.guard.background import Background


def test_jobs_run_in_their_order_beside_the_main_thread() -> None:
    background, done, may_go_on = Background(), [], threading.Event()
    background.submit(lambda: done.append(may_go_on.wait(200)))
    background.submit(lambda: done.append(threading.current_thread() is threading.main_thread()))
    assert done == []
    assert not background.is_idle
    may_go_on.set()
    background.wait()
    assert done == [True, False]
    assert background.is_idle


def test_nothing_runs_after_a_failure_until_it_was_heard_of() -> None:
    background, done, may_fail = Background(), [], threading.Event()

    def fail() -> None:
        may_fail.wait(200)
        raise OSError("no room")

    background.submit(fail)
    background.submit(lambda: done.append("old one removed"))
    background.check()  # it has not failed yet
    may_fail.set()
    with pytest.raises(OSError, match="no room"):
        background.wait()
    background.check()
    assert done == []
    background.submit(lambda: done.append("next"))
    background.wait()
    assert done == ["next"]


def test_what_failed_while_it_was_waited_for_was_heard_of() -> None:
    background, done = Background(), []

    def fail() -> None:
        while not background.is_idle:  # until it is waited for
            time.sleep(0.001)
        time.sleep(0.05)
        raise OSError("no room")

    background.submit(fail)
    with pytest.raises(OSError, match="no room"):
        background.wait()
    background.submit(lambda: done.append("next"))
    time.sleep(0.05)
    background.wait()
    assert done == ["next"]
