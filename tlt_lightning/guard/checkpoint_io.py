"""Write a checkpoint completely or not at all, beside the run; explain one that cannot be read."""

from __future__ import annotations

import logging
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint
from typing_extensions import override

from tlt_lightning.engine.host_copy import HostCopy
from tlt_lightning.guard.background import Background
from tlt_lightning.guard.files import PART, part_of, write_whole
from tlt_lightning.guard.parts import OWN, TOKEN, read_part, remove_lost_parts, remove_parts

log = logging.getLogger(__name__)


class WholeCheckpointIO(TorchCheckpointIO):
    """Writes Lightning's checkpoint files, never half of one under its name, even if killed.

    Lightning's own writes to the folder of temporary files and moves, which across file systems is a copy; leaves that
    file behind when killed; and ignores a missing permission. This one writes next to the target, has the disk take it,
    and renames. A link to a removed checkpoint points to the latest one before. Paths that are not local are
    Lightning's.

    Within `behind` the run waits for a copy on the host alone, and a thread writes. One checkpoint is under way at a
    time, in memory that is kept for the next; links and removals wait their turn behind it. The error of a write comes
    with the next `check`, save or `wait`. Lightning's `AsyncCheckpointIO` copies on the device, bounds no memory, and
    links and removes before the file is there.
    """

    def __init__(self, rank: int = 0) -> None:
        self._rank = rank
        self._latest: str | None = None
        self._background, self._host = Background(), HostCopy()
        self._is_behind = False

    @contextmanager
    def behind(self) -> Iterator[None]:
        """Let a thread write what is saved meanwhile."""
        self._is_behind = True
        try:
            yield
        finally:
            self._is_behind = False

    def check(self) -> None:
        """Raise the error of a checkpoint that could not be written, without waiting for one under way."""
        self._background.check()

    def wait(self) -> None:
        """Wait for the checkpoint under way, or raise the error that it could not be written."""
        self._background.wait()

    @override
    def teardown(self) -> None:
        self.wait()
        self._host = HostCopy()

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        self.wait()
        if self._is_behind:
            copy = self._host.fill_state(checkpoint)
            self._background.submit(lambda: self._write(copy, path, storage_options))
        else:
            self._write(checkpoint, path, storage_options)

    def _write(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None) -> None:
        if "://" in str(path) or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        write_whole(checkpoint, Path(path))
        self._latest = str(path)
        remove_parts(path, besides=checkpoint.get(TOKEN, "none"))

    @override
    def remove_checkpoint(self, path: Any) -> None:
        self._in_turn(partial(self._remove, path))

    def link(self, filepath: str, linkpath: str) -> None:
        """Let the link name `filepath` as soon as that is written."""
        self._in_turn(partial(replace_link, filepath, linkpath))

    def _in_turn(self, job: Callable[[], object]) -> None:
        if self._background.is_idle:
            job()
        else:
            self._background.submit(job)

    def _remove(self, path: Any) -> None:
        if "://" not in str(path) and self._latest is not None:
            for link in Path(path).parent.glob("*.ckpt"):
                if link.is_symlink() and link != Path(path) and link.resolve() == Path(path).resolve():
                    replace_link(self._latest, str(link))
        super().remove_checkpoint(path)
        if "://" not in str(path):
            remove_parts(path)

    @override
    def load_checkpoint(self, path: Any, map_location: Any = "cpu", **options: Any) -> dict[str, Any]:
        # Lightning's own default is a function, with which torch loads no tensor that holds others (8-bit states).
        self.wait()
        check_readable(path)
        try:
            checkpoint = super().load_checkpoint(path, map_location, **options)
            part = read_part(path, checkpoint[TOKEN], self._rank) if self._rank and TOKEN in checkpoint else None
            return checkpoint if part is None else checkpoint | {OWN: part}
        except (EOFError, RuntimeError, pickle.UnpicklingError) as error:
            raise ValueError(
                f"The checkpoint {str(path)!r} cannot be read: {str(error).splitlines()[0]}{_others(Path(path))}"
            ) from error


def check_readable(path: Any) -> None:
    """Raise FileNotFoundError or ValueError if a checkpoint is missing or empty; name others."""
    file = Path(path)
    if "://" in str(path) or file.is_dir():
        return
    if file.is_symlink() and not file.exists():
        raise FileNotFoundError(
            f"The checkpoint {str(path)!r} is a link to {os.readlink(file)!r}, which is missing{_others(file)}"
        )
    if not file.exists():
        raise FileNotFoundError(f"The checkpoint {str(path)!r} does not exist{_others(file)}")
    if not file.stat().st_size:
        raise ValueError(f"The checkpoint {str(path)!r} is empty: its writing was cut off{_others(file)}")


def replace_link(filepath: str, linkpath: str) -> None:
    """Let the link name `filepath` at once; never is the link missing or broken."""
    if os.path.abspath(filepath) == os.path.abspath(linkpath):
        return
    temporary = str(part_of(Path(linkpath)))
    with suppress(FileNotFoundError):
        os.remove(temporary)
    try:
        os.symlink(os.path.relpath(filepath, os.path.dirname(linkpath)), temporary)
    except OSError:  # a file system without links
        shutil.copy(filepath, temporary)
    if os.path.isdir(linkpath) and not os.path.islink(linkpath):
        shutil.rmtree(linkpath)
    os.replace(temporary, linkpath)


def link_checkpoint(trainer: L.Trainer, filepath: str, linkpath: str) -> None:
    """Replace `ModelCheckpoint._link_checkpoint`, which removes the old link first."""
    if trainer.is_global_zero:
        io = trainer.strategy.checkpoint_io
        (io.link if isinstance(io, WholeCheckpointIO) else replace_link)(filepath, linkpath)
    trainer.strategy.barrier()


def save_behind(callback: ModelCheckpoint, trainer: L.Trainer, filepath: str) -> None:
    """Replace `ModelCheckpoint._save_checkpoint`, for which the run waits; book what is left as `checkpoint`."""
    io, books = trainer.strategy.checkpoint_io, getattr(trainer.lightning_module, "iteration_log", None)
    with (
        nullcontext() if books is None else books.apart("checkpoint"),
        io.behind() if isinstance(io, WholeCheckpointIO) else nullcontext(),
    ):
        type(callback)._save_checkpoint(callback, trainer, filepath)


def remove_leftovers(folder: Path) -> None:
    """Delete half-written checkpoints of a killed process; nobody else may write to `folder`."""
    for part in [*folder.glob(f".*{PART}"), *folder.glob(f"*.ranks/.*{PART}")]:
        log.warning("Removing %s, the rest of a checkpoint whose writing was cut off.", part)
        part.unlink()
    for parts in remove_lost_parts(folder):
        log.warning("Removed %s, parts of a checkpoint that is not there.", parts)


def _others(path: Path) -> str:
    """Return the end of a message: the checkpoints beside `path`, the latest first."""
    files = [other for other in path.parent.glob("*.ckpt") if other.is_file() and other.stat().st_size]
    files = [file for file in files if not file.is_symlink() and file != path]
    names = [str(file) for file in sorted(files, key=lambda file: -file.stat().st_mtime)[:5]]
    return f". Beside it lie {', '.join(names)}." if names else "; no other checkpoint lies beside it."
