"""Notice that another worker has failed or died, and tell the others of this worker's end."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from datetime import timedelta

import lightning as L
from torch.distributed import TCPStore

log = logging.getLogger(__name__)

_BEAT_SECONDS = 1.0
_SILENT_SECONDS = 60.0  # a worker that loads or compiles may keep its other threads from running for a while
_STORE_SECONDS = 60.0
_FAILURE = "failure"


class Liveness:
    """Watches the other workers of a run through a store of its own, so that asking never meets a collective.

    A thread in each worker gives a sign of life every second and listens for that of the next rank. Once a worker has
    failed or died, `check` and `count` raise in all others. A worker that is merely slow is waited for.

    Args:
        trainer: With more than one worker; its strategy tells the others where the store is.
    """

    def __init__(self, trainer: L.Trainer) -> None:
        self.rank, self.world_size = trainer.global_rank, trainer.world_size
        host, timeout = os.environ.get("MASTER_ADDR", "127.0.0.1"), timedelta(seconds=_STORE_SECONDS)
        if trainer.is_global_zero:
            self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timeout)
        port = trainer.strategy.broadcast(self._store.port if trainer.is_global_zero else 0)
        if not trainer.is_global_zero:
            self._store = TCPStore(host, port, is_master=False, timeout=timeout)
        self._failure: str | None = None
        self._closed = threading.Event()
        self._watch = threading.Thread(target=self._watch_others, name="liveness", daemon=True)
        self._watch.start()
        atexit.register(self.close)  # a thread inside the store's code when Python ends takes the process down

    def check(self) -> None:
        """Raise RuntimeError if another worker has failed or died; looks at a flag only."""
        if self._failure is not None:
            raise RuntimeError(f"The run cannot go on: {self._failure}.")

    def count(self, key: str, amount: int) -> int:
        """Add `amount` to a number that all workers share, and return it; raises what `check` does."""
        self.check()
        try:
            return self._store.add(key, amount)
        except RuntimeError as error:
            raise RuntimeError(f"The run cannot go on: {self._lost}.") from error

    def report(self, error: BaseException) -> None:
        """Tell the other workers what ended this one; their next `check` raises."""
        if self._failure is not None:
            return  # this worker stops because of another one
        try:
            self._store.set(_FAILURE, f"rank {self.rank} ended with {type(error).__name__}: {error}")
        except RuntimeError:
            log.warning("Rank %d could not tell the other ranks of its error.", self.rank)

    def close(self) -> None:
        """Give no more signs of life; safe to call twice."""
        self._closed.set()
        self._watch.join(_STORE_SECONDS)
        atexit.unregister(self.close)

    @property
    def _lost(self) -> str:
        return f"rank {self.rank} lost touch with rank 0, which has ended or does not answer"

    def _watch_others(self) -> None:
        watched = (self.rank + 1) % self.world_size  # a ring: each worker is watched by one other
        last, heard = 0, time.monotonic()
        try:
            while not self._closed.wait(_BEAT_SECONDS) and self._failure is None:
                self._store.add(f"beat/{self.rank}", 1)
                beat = self._store.add(f"beat/{watched}", 0)
                now = time.monotonic()
                if beat != last or beat == 0:  # one that has not begun is still loading
                    last, heard = beat, now
                elif now - heard > _SILENT_SECONDS and not self._closed.is_set():
                    self._store.set(_FAILURE, f"rank {watched} has given no sign of life for {now - heard:.0f} s")
                if self._store.check([_FAILURE]):
                    self._failure = self._store.get(_FAILURE).decode()
        except RuntimeError:
            self._failure = None if self._closed.is_set() else self._lost
