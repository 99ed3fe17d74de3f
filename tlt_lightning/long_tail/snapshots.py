"""Snapshots of the drafter that training does not wait for: only what is trained, written in the background."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Self

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from tlt_lightning.host_copy import HostCopy

PARTIAL = ".partial"


class SnapshotWriter:
    """Writes snapshots of the trained tensors to a directory without holding up the training loop.

    `save` copies the tensors to host memory, from a GPU without waiting for it, and returns; a thread writes them.
    A file appears complete or not at all. There is one place in the queue: a snapshot that still waits for an earlier
    one to be written is replaced by the next, so a slow disk costs snapshots, never
    time. Host memory for two copies is kept, page-locked for tensors of a GPU.

    A failed write raises `RuntimeError` at the next `save`, `wait` or `close`, once.

    Args:
        dirpath: Directory to write to; made if missing. One writer at a time.
        keep_last: Snapshots to keep; those written earlier are deleted.

    Example:
        >>> with SnapshotWriter("outputs/drafter") as writer:  # doctest: +SKIP
        ...     writer.save(drafter.trainable_tensors(), version=3)
    """

    def __init__(self, dirpath: str | Path, keep_last: int = 2) -> None:
        if keep_last < 1:
            raise ValueError(f"`keep_last` must be at least 1, got {keep_last}.")
        self.dirpath = Path(dirpath)
        self.keep_last = keep_last
        self.milliseconds = 0.0
        """How long the last `save` held up its caller."""
        self.dirpath.mkdir(parents=True, exist_ok=True)
        for path in self.dirpath.glob(f"*{PARTIAL}"):
            path.unlink()  # of a process that ended while it wrote
        self._written = list_snapshots(self.dirpath)
        self._condition = threading.Condition()
        self._free = [_Snapshot(), _Snapshot()]
        self._pending: _Snapshot | None = None
        self._is_writing = False
        self._is_closed = False
        self._error: Exception | None = None
        # A daemon: a run that ends by an exception is not kept alive by its snapshots.
        self._thread = threading.Thread(target=self._run, name="drafter-snapshots", daemon=True)
        self._thread.start()

    def save(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Take a snapshot of the tensors as they are now; they may be changed as soon as this returns.

        Args:
            tensors: Names and tensors, as `DrafterModule.trainable_tensors` gives them.
            version: Of the drafter; names the file. A snapshot of the same version is replaced.
        """
        started = time.perf_counter()
        with self._condition:
            self._raise_error()
            if self._is_closed:
                raise RuntimeError("The snapshot writer is closed; make a new one.")
            replaced, self._pending = self._pending, None
            copy = replaced or self._free.pop()  # at most one of the two is being written
        try:
            copy.version = version
            copy.fill(tensors)
        except BaseException:
            with self._condition:
                self._free.append(copy)
            raise
        with self._condition:
            self._pending = copy
            self._condition.notify_all()
        self.milliseconds = 1e3 * (time.perf_counter() - started)

    def wait(self) -> None:
        """Return when everything saved so far is on disk."""
        with self._condition:
            self._condition.wait_for(lambda: self._pending is None and not self._is_writing)
            self._raise_error()

    def close(self) -> None:
        """Write what is left and end the thread; may be called again."""
        with self._condition:
            self._is_closed = True
            self._condition.notify_all()
        self._thread.join()
        with self._condition:
            self._raise_error()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise RuntimeError(f"A snapshot of the drafter could not be written to {str(self.dirpath)!r}.") from error

    def _run(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._pending is not None or self._is_closed)
                copy, self._pending = self._pending, None
                if copy is None:
                    return
                self._is_writing = True
            error: Exception | None = None
            try:
                self._write(copy)
            except Exception as caught:
                error = caught  # raised in the caller's thread, where somebody sees it
            with self._condition:
                self._error = error or self._error
                self._free.append(copy)
                self._is_writing = False
                self._condition.notify_all()

    def _write(self, copy: _Snapshot) -> None:
        path = self.dirpath / f"drafter-{copy.version:08d}.safetensors"
        partial = path.with_name(path.name + PARTIAL)
        try:
            save_file(copy.tensors, partial, metadata={"format": "pt", "version": str(copy.version)})
            with partial.open("rb") as file:
                os.fsync(file.fileno())  # the name must not reach the disk before the contents
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)  # on a full disk, what it takes is needed
        self._written = [*(earlier for earlier in self._written if earlier != path), path]
        while len(self._written) > self.keep_last:
            self._written.pop(0).unlink(missing_ok=True)


class _Snapshot(HostCopy):
    """Host memory for one snapshot."""

    version = 0


def list_snapshots(dirpath: str | Path) -> list[Path]:
    """The complete snapshots in a directory, by version."""
    return sorted(Path(dirpath).glob("drafter-*.safetensors"))


def load_snapshot(path: str | Path) -> tuple[dict[str, Tensor], int]:
    """Read a snapshot: the tensors, for `DrafterModule.load_trainable`, and the drafter's version."""
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, int(file.metadata()["version"])  # noqa: SIM118
