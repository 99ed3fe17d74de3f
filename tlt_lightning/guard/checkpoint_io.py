"""Write a checkpoint completely or not at all, beside the run; explain one that cannot be read."""

import logging
import os
import pickle
import shutil
import time
import zipfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint
from typing_extensions import override

from tlt_lightning.guard.background import Background
from tlt_lightning.guard.files import PART, part_of, write_whole
from tlt_lightning.guard.parts import OWN, TOKEN, missing_parts, read_part, remove_lost_parts, remove_parts
from tlt_lightning.guard.shards import SHARDS, make_whole, put_together
from tlt_lightning.host_copy import HostCopy
from tlt_lightning.replacing import replaced

log = logging.getLogger(__name__)

_PATIENCE = 1800.0  # seconds for which shards of other ranks may be late
_POLL_SECONDS = 0.05


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
        self._deadline = 0.0  # until when shards of other ranks may come

    def behind(self) -> AbstractContextManager[None]:
        """Let a thread write what is saved meanwhile."""
        return replaced(self, "_is_behind", True)

    def check(self) -> None:
        """Raise the error of a checkpoint that could not be written, without waiting for one under way."""
        self._background.check()

    def wait(self, patience: float | None = None) -> None:
        """Wait for the checkpoint under way, or raise the error that it could not be written.

        Args:
            patience: Most seconds that it may still wait for the parts of other ranks, which may have ended.
        """
        if patience is not None:
            self._deadline = min(self._deadline, time.monotonic() + patience)
        self._background.wait()

    @override
    def teardown(self) -> None:
        self.wait()
        self._host = HostCopy()

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        self._hand_over(checkpoint, lambda state: self._write(state, path, storage_options))

    def save_part(self, own: dict[str, Any], path: Path) -> None:
        """Write a rank's part of a checkpoint, as `save_checkpoint` does rank zero's."""
        self._hand_over(own, lambda state: write_whole(state, path))

    def _hand_over(self, state: dict[str, Any], write: Callable[[dict[str, Any]], None]) -> None:
        self.wait()
        self._deadline = time.monotonic() + _PATIENCE
        if self._is_behind:
            copy = self._host.fill_state(state)
            self._background.submit(lambda: write(copy))
        else:
            write(state)

    def _write(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None) -> None:
        if "://" in str(path) or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        if checkpoint.get(SHARDS, 1) > 1:
            self._await_parts(path, checkpoint[TOKEN], checkpoint[SHARDS])
        write_whole(checkpoint, Path(path))
        self._latest = str(path)
        remove_parts(path, besides=checkpoint.get(TOKEN, "none"))

    def _await_parts(self, path: Any, token: str, num_shards: int) -> None:
        while missing := missing_parts(path, token, num_shards):
            if time.monotonic() > self._deadline:
                raise RuntimeError(
                    f"The checkpoint {str(path)!r} could not be written: shards of other ranks have not come, among "
                    f"them {str(missing[0])!r}. If none of these ranks has ended, they write elsewhere: give all "
                    "ranks one folder, of a file system that they share."
                )
            time.sleep(_POLL_SECONDS)

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
    def load_checkpoint(
        self, path: Any, map_location: Any = "cpu", weights_only: bool | None = None, *, as_rows: bool = False
    ) -> dict[str, Any]:
        """Read a checkpoint, and what this rank has of its own.

        Args:
            path: Path of the checkpoint.
            map_location: Lightning's own default is a function, with which torch loads no tensor that holds others
                (8-bit states).
            weights_only: As for `torch.load`.
            as_rows: Leave tensors in their files, and those of a sharded run as `Rows`; otherwise all are whole.
        """
        self.wait()
        check_readable(path)
        try:
            if as_rows:
                checkpoint = torch.load(path, map_location=map_location, mmap=True, weights_only=weights_only)
            else:
                checkpoint = super().load_checkpoint(path, map_location, weights_only)
            if "pytorch-lightning_version" not in checkpoint:
                raise RuntimeError("no Trainer has written it; a model to begin with is `model.policy`")
            part = read_part(path, checkpoint[TOKEN], self._rank) if self._rank and TOKEN in checkpoint else None
            if SHARDS in checkpoint:
                checkpoint = put_together(checkpoint, self._shards_of(path, checkpoint))
                checkpoint = checkpoint if as_rows else make_whole(checkpoint)
            return checkpoint if part is None else checkpoint | {OWN: part}
        except (EOFError, RuntimeError, pickle.UnpicklingError) as error:
            raise ValueError(
                f"`ckpt_path` {str(path)!r} cannot be read: {str(error).splitlines()[0]}{_others(Path(path))}"
            ) from error

    def _shards_of(self, path: Any, checkpoint: dict[str, Any]) -> list[dict[str, Any]]:
        parts = [read_part(path, checkpoint[TOKEN], rank) for rank in range(1, checkpoint[SHARDS])]
        if missing := [rank for rank, part in enumerate(parts, 1) if part is None]:
            raise FileNotFoundError(
                f"`ckpt_path` {str(path)!r} is of {checkpoint[SHARDS]} shards, and those of ranks {missing} are not "
                f"beside it: its folder {Path(path).name}.ranks belongs to it."
            )
        return [part[SHARDS] for part in parts if part is not None]


def check_readable(path: Any) -> None:
    """Raise FileNotFoundError or ValueError if a checkpoint is missing or not whole; name others."""
    file = Path(path)
    if "://" in str(path) or zipfile.is_zipfile(file):
        return
    if not file.exists():
        raise FileNotFoundError(f"`ckpt_path` {str(path)!r} does not exist, or links to what does not{_others(file)}")
    raise ValueError(
        f"`ckpt_path` {str(path)!r} is not a complete checkpoint (cut off while written, or a folder, or another kind "
        f"of file){_others(file)}"
    )


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
    os.replace(temporary, linkpath)


def link_checkpoint(callback: ModelCheckpoint, trainer: L.Trainer, filepath: str, linkpath: str) -> None:
    """Replace `ModelCheckpoint._link_checkpoint`, which removes the old link first."""
    if trainer.is_global_zero:
        io = trainer.strategy.checkpoint_io
        (io.link if isinstance(io, WholeCheckpointIO) else replace_link)(filepath, linkpath)
    trainer.strategy.barrier()


def save_behind(callback: ModelCheckpoint, trainer: L.Trainer, filepath: str) -> None:
    """Replace `ModelCheckpoint._save_checkpoint`: write in a thread, and log how long the run waits all the same."""
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
    found = [*path.parent.glob("*.ckpt"), *path.parent.glob("earlier_*/*.ckpt")]
    files = [file for file in found if zipfile.is_zipfile(file) and not file.is_symlink()]
    files = [file for file in files if file.resolve() != path.resolve()]
    names = [str(file) for file in sorted(files, key=lambda file: -file.stat().st_mtime)[:5]]
    return f". Beside it lie {', '.join(names)}." if names else "; no other checkpoint lies beside it."
