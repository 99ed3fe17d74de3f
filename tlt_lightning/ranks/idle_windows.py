"""Open a rank's idle window after its rollout, and close it after the last rank's."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import lightning as L
from torch.distributed import TCPStore

from tlt_lightning.ranks.liveness import Liveness

_POLL_SECONDS = 0.002
_STORE_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class IdleWindow:
    """Tells a rank whose rollout is done about the ranks that still write.

    Args:
        is_open: Cheap to call and safe to call often; False once the last rank has finished.
        num_waiting_for: Ranks still rolling out when the window opened.
    """

    is_open: Callable[[], bool]
    num_waiting_for: int


class IdleWindows:
    """Counts finished ranks in a store of its own, apart from the training's collectives.

    Args:
        trainer: With more than one rank; its strategy tells the others where the store is.
        liveness: A window raises what its `check` does, once another rank has failed or died.
    """

    def __init__(self, trainer: L.Trainer, liveness: Liveness) -> None:
        self.liveness, self.num_closed = liveness, 0
        self._rollout, self._world_size = 0, trainer.world_size
        host, timeout = os.environ.get("MASTER_ADDR", "127.0.0.1"), timedelta(seconds=_STORE_SECONDS)
        if trainer.is_global_zero:
            self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timeout)
        port = trainer.strategy.broadcast(self._store.port if trainer.is_global_zero else 0)
        if not trainer.is_global_zero:
            self._store = TCPStore(host, port, is_master=False, timeout=timeout)

    @contextmanager
    def window(self) -> Iterator[IdleWindow]:
        """Report this rank done and open its idle window; leaving waits for the last rank."""
        key = f"finished/{self._rollout}"
        self._rollout += 1
        finished = self._count(key, 1)

        def is_open() -> bool:
            return self._count(key, 0) < self._world_size

        yield IdleWindow(is_open=is_open, num_waiting_for=self._world_size - finished)
        while is_open():
            time.sleep(_POLL_SECONDS)
        self.num_closed += 1

    def _count(self, key: str, amount: int) -> int:
        self.liveness.check()
        try:
            return self._store.add(key, amount)
        except RuntimeError as error:
            self.liveness.report(error)  # notes on it that rank 0, which keeps the store, has ended
            raise
