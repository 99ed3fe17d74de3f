import pytest

from tests.support.two_workers import failure, two_workers
from tlt_lightning.data import liveness
from tlt_lightning.data.idle import IdleWindows


def test_the_window_of_the_first_is_open_until_the_last_is_done() -> None:
    with two_workers() as workers:
        first, second = map(IdleWindows, workers)
        for _ in range(2):
            with second.window() as early:
                assert early.is_open()
                assert early.num_waiting_for == 1
                with first.window() as late:
                    assert not late.is_open()
                    assert late.num_waiting_for == 0
                assert not early.is_open()


def test_a_window_ends_with_the_error_of_another_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "_BEAT_SECONDS", 0.02)
    with two_workers() as workers:
        workers[1].report(ValueError("out of luck"))
        failure(workers[0])
        with pytest.raises(RuntimeError, match="out of luck"), IdleWindows(workers[0]).window():
            pass
