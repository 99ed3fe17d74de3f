"""Who still writes: how a worker that is done learns when the last one is."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

import lightning as L
from torch.distributed import TCPStore

from tlt_lightning.hooks import IdleWindow

_POLL_SECONDS = 0.002


class IdleCoordinator:
    """Counts finished workers in a store of its own, so that asking never meets a collective of the training.

    Args:
        trainer: With more than one worker; its strategy tells the others where the store is.
    """

    def __init__(self, trainer: L.Trainer) -> None:
        self.world_size = trainer.world_size
        host = os.environ.get("MASTER_ADDR", "127.0.0.1")
        if trainer.is_global_zero:
            self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        port = trainer.strategy.broadcast(self._store.port if trainer.is_global_zero else 0)
        if not trainer.is_global_zero:
            self._store = TCPStore(host, port, is_master=False)
        self._rollout = 0

    @contextmanager
    def window(self) -> Iterator[IdleWindow]:
        """Report this worker done and open its idle window; leaving waits for the last worker."""
        key = f"finished/{self._rollout}"
        self._rollout += 1
        finished = self._store.add(key, 1)

        def is_open() -> bool:
            return self._store.add(key, 0) < self.world_size

        yield IdleWindow(is_open=is_open, num_waiting_for=self.world_size - finished)
        while is_open():
            time.sleep(_POLL_SECONDS)
