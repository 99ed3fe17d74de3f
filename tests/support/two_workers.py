"""Two workers in one process, each with its watch over the other."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

from tlt_lightning.data.liveness import Liveness


@contextmanager
def two_workers() -> Iterator[list[Liveness]]:
    told: list[int] = []

    def broadcast(port: int) -> int:
        told.append(port)
        return told[0]

    strategy = SimpleNamespace(broadcast=broadcast)
    workers = [
        Liveness(SimpleNamespace(world_size=2, global_rank=rank, is_global_zero=rank == 0, strategy=strategy))  # type: ignore[arg-type]
        for rank in (0, 1)
    ]
    yield workers
    for worker in workers:
        worker.close()


def failure(worker: Liveness, seconds: float = 5.0) -> str:
    """Return what `check` raises, once it does."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            worker.check()
        except RuntimeError as error:
            return str(error)
        time.sleep(0.01)
    return "nothing was raised"
