"""Two workers or more in one process, each with its watch over the others."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from queue import Queue
from types import SimpleNamespace
from typing import Any

from tlt_lightning.ranks.idle_windows import IdleWindows
from tlt_lightning.ranks.liveness import Liveness


def make_trainers(patience: float = 60.0, num_ranks: int = 2) -> list[Any]:
    """Return what `Liveness` and `IdleWindows` look at of the ranks' trainers."""
    ports: Queue[int] = Queue()

    def broadcast_from_zero(port: int) -> int:
        for _ in range(1, num_ranks):
            ports.put(port)
        return port

    return [
        SimpleNamespace(
            world_size=num_ranks,
            global_rank=rank,
            is_global_zero=rank == 0,
            strategy=SimpleNamespace(
                broadcast=broadcast_from_zero if rank == 0 else lambda _: ports.get(timeout=100),
                _timeout=timedelta(seconds=patience),
            ),
        )
        for rank in range(num_ranks)
    ]


@contextmanager
def two_workers(patience: float = 60.0, num_ranks: int = 2) -> Iterator[list[Liveness]]:
    with ThreadPoolExecutor() as pool:
        workers = list(pool.map(Liveness, make_trainers(patience, num_ranks)))
    try:
        yield workers
    finally:  # one that is left open would end this process
        for worker in workers:
            worker.close()


def idle_windows(workers: list[Liveness]) -> list[IdleWindows]:
    with ThreadPoolExecutor() as pool:
        return list(pool.map(IdleWindows, make_trainers(), workers))


def failure(worker: Liveness, seconds: float = 100.0) -> str:
    """Return what `check` raises, once it does."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            worker.check()
        except RuntimeError as error:
            return str(error)
        time.sleep(0.01)
    return "nothing was raised"
