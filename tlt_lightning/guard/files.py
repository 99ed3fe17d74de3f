"""Write a file completely or not at all, and keep those of earlier runs."""

import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import torch

log = logging.getLogger(__name__)

PART = ".part"
"""Ending of a file that is being written; its name begins with a dot."""


def part_of(target: Path) -> Path:
    """Return the name under which `target` is written."""
    return target.with_name(f".{target.name}{PART}")


def write_whole(state: Any, target: Path) -> None:
    """Save `state` next to the target, have the disk take it, and rename; RuntimeError says why it cannot be."""
    part = part_of(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(part, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, target)
        _sync_folder(target.parent)
    except BaseException as error:  # Ctrl-C, too
        with suppress(OSError):
            part.unlink()
        if not isinstance(error, Exception):
            raise
        reason = error if isinstance(error, OSError) else error.__context__ or error  # torch's, of a full disk
        raise RuntimeError(
            f"The checkpoint {str(target)!r} could not be written: {reason}. Earlier ones are whole: mend this, "
            "or give a folder with room, and resume."
        ) from reason


def set_aside(folder: Path, paths: Sequence[Path], what: str) -> None:
    """Move what an earlier run has left in a folder to `earlier_0`, or the next number that has none of it, in it.

    A run that was killed amid this is gone on with, links first: none is left behind its file.

    Args:
        folder: Of this run, too.
        paths: Files and folders in it; none are moved if none are there.
        what: Names them in the warning.
    """
    if not (there := [path for path in paths if path.exists() or path.is_symlink()]):
        return
    names = {path.name for path in there}
    numbered = (folder / f"earlier_{number}" for number in count())
    kept = next(path for path in numbered if not path.exists() or names.isdisjoint(os.listdir(path)))
    kept.mkdir(exist_ok=True)
    for path in sorted(there, key=lambda path: not path.is_symlink()):
        path.rename(kept / path.name)
    log.warning(
        "%s held %s of an earlier run, kept in %s from now on: remove what you do not need. Give a run a folder of its "
        "own (`--trainer.default_root_dir`), or let it go on from the earlier one (`fit --ckpt_path`).",
        *(folder, what, kept.name),
    )


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
