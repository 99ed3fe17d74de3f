"""Time an engine's start by part, and say what it waits for."""

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

log = logging.getLogger(__name__)

PATIENCE = 15.0
"""Seconds of a part after which a line says what takes so long, and again after as many."""


class StartUp:
    """Times the parts of a start by name; whoever waits for a long one is told which it is."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time the block, which may be one of several of this name."""
        began, over = time.perf_counter(), threading.Event()
        threading.Thread(target=self._tell, args=(name, over), daemon=True).start()
        try:
            yield
        finally:
            over.set()
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began

    def _tell(self, name: str, over: threading.Event) -> None:
        waited = 0.0
        while not over.wait(PATIENCE):
            waited += PATIENCE
            log.info(
                "vLLM is not ready yet: %s has taken %.0f s. A model's first start on a machine takes a minute or two; "
                "later ones find what it compiled. To see where it stands still: PYTHONFAULTHANDLER=1, and SIGABRT.",
                name,
                waited,
            )

    def __str__(self) -> str:
        return ", ".join(f"{name} {seconds:.1f}" for name, seconds in self.seconds.items() if seconds >= 0.05)
