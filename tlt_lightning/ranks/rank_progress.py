"""Tell a rank of an engine that is held up from one that runs a step which the others do not."""

from __future__ import annotations

import threading
from contextlib import suppress

import torch.distributed as dist

_TELL_SECONDS = 0.5


class RankProgress:
    """Tells in the store of an engine's ranks how far each of them has come in a rollout.

    Ranks hold the same meetings and begin the same steps, in one order. A thread tells both numbers, so it does while
    its rank waits in a step for the others; a rank whose interpreter is held tells nothing new. Numbers only grow: one
    that is late is never taken for one that has parted.

    Args:
        store: Shared by the ranks.
        index: Of this rank.
        num_ranks: Ranks that share it.
    """

    def __init__(self, store: dist.Store, index: int, num_ranks: int) -> None:
        self.num_steps = 0
        """Steps that this rank has begun; the end of a rollout counts as one: a rank that has left it is ahead."""
        self.num_meetings = 0
        """Meetings that this rank has come to."""
        self._store, self._index = store, index
        self._others = [other for other in range(num_ranks) if other != index]
        self._is_over = threading.Event()
        self._is_over.set()
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Tell how far this rank is until `end`."""
        self._is_over = threading.Event()
        threading.Thread(target=self._tell_on, args=(self._is_over,), name="rank progress", daemon=True).start()

    def end(self) -> None:
        """Tell that this rank has left the rollout; safe to call twice."""
        if not self._is_over.is_set():
            self._is_over.set()
            self.num_steps += 1
            self.tell()

    def tell(self) -> None:
        """Write both numbers of now to the store."""
        with self._lock, suppress(RuntimeError):  # the store's host has gone
            num_steps = self.num_steps  # read first, so that the meetings told are none too few for these steps
            self._store.set(self._key(self._index), f"{num_steps} {self.num_meetings}")

    def find_parted(self) -> list[int]:
        """Return the ranks that have parted from this one, which waits at a meeting; none while others are late.

        A rank is ahead that has begun another step without this meeting. If all have come to it, and it does not end,
        they hold different ones.
        """
        told = {other: self._read(other) for other in self._others}
        missing = {other: steps for other, (steps, meetings) in told.items() if meetings < self.num_meetings}
        if missing:
            return [other for other, steps in missing.items() if steps > self.num_steps]
        return self._others

    def _tell_on(self, is_over: threading.Event) -> None:
        while not is_over.wait(_TELL_SECONDS):
            self.tell()

    def _read(self, other: int) -> tuple[int, int]:
        if not self._store.check([self._key(other)]):
            return 0, 0
        steps, meetings = self._store.get(self._key(other)).split()
        return int(steps), int(meetings)

    def _key(self, index: int) -> str:
        return f"progress of {index}"
