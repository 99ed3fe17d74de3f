"""Run jobs one after another in a thread, and none after one that failed."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait


class Background:
    """Runs jobs in their order beside the main thread, which hears of a failure when it asks.

    Jobs behind one that failed are left out: an old checkpoint is not removed if the new one could not be written.

    Example:
        >>> background, done = Background(), []
        >>> background.submit(lambda: done.append(1))
        >>> background.wait()
        >>> done
        [1]
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._jobs: list[Future[None]] = []
        self._has_failed = False

    @property
    def is_idle(self) -> bool:
        """True if nothing was submitted since the last `wait`."""
        return not self._jobs

    def submit(self, job: Callable[[], object]) -> None:
        """Run `job` after those before it, unless one of them fails."""
        self._jobs.append(self._thread.submit(self._run, job))

    def check(self) -> None:
        """Raise the error of a job that has failed, without waiting for others."""
        if self._has_failed:
            self.wait()

    def wait(self) -> None:
        """Wait for all jobs, or raise the error of the one that failed; go on with new ones."""
        jobs, self._jobs = self._jobs, []
        wait(jobs)
        self._has_failed = False
        for job in jobs:
            job.result()

    def _run(self, job: Callable[[], object]) -> None:
        if not self._has_failed:
            try:
                job()
            except BaseException:
                self._has_failed = True
                raise
