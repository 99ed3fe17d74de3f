"""Open a worker's idle window when its rollout is done, and close it when the last worker's is."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from tlt_lightning.data.liveness import Liveness
from tlt_lightning.hooks import IdleWindow

_POLL_SECONDS = 0.002


class IdleWindows:
    """Counts the workers whose rollout is done, so that each knows how long its idle window is open.

    Args:
        liveness: Of this run; a window raises RuntimeError once another worker has failed or died.
    """

    def __init__(self, liveness: Liveness) -> None:
        self.liveness = liveness
        self._rollout = 0

    @contextmanager
    def window(self) -> Iterator[IdleWindow]:
        """Report this worker done and open its idle window; leaving waits for the last worker."""
        key, world_size = f"finished/{self._rollout}", self.liveness.world_size
        self._rollout += 1
        finished = self.liveness.count(key, 1)

        def is_open() -> bool:
            return self.liveness.count(key, 0) < world_size

        yield IdleWindow(is_open=is_open, num_waiting_for=world_size - finished)
        while is_open():
            time.sleep(_POLL_SECONDS)
