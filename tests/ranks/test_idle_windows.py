from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.two_workers import failure, idle_windows, two_workers


def test_the_window_of_the_first_is_open_until_the_last_is_done() -> None:
    with two_workers() as workers:
        first, second = idle_windows(workers)
        for _ in range(2):
            with second.window() as early:
                assert early.is_open()
                assert early.num_waiting_for == 1
                with first.window() as late:
                    assert not late.is_open()
                    assert late.num_waiting_for == 0
                assert not early.is_open()


def test_nobody_goes_on_before_the_last_is_done() -> None:
    with two_workers() as workers, ThreadPoolExecutor() as pool:
        first, second = idle_windows(workers)

        def wait() -> None:
            with second.window():
                pass

        waiting = pool.submit(wait)
        try:
            with pytest.raises(TimeoutError):
                waiting.result(0.1)
            assert second.num_closed == 0
        finally:
            with first.window():
                pass
        waiting.result(10)
        assert first.num_closed == second.num_closed == 1


def test_a_window_ends_with_the_error_of_another_worker() -> None:
    with two_workers() as workers:
        first, _ = idle_windows(workers)
        workers[1].report(ValueError("out of luck"))
        failure(workers[0])
        with pytest.raises(RuntimeError, match="out of luck"), first.window():
            pass
