"""Write a file completely or not at all."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

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
    except (OSError, RuntimeError) as error:  # torch reports a full disk as either
        with suppress(OSError):
            part.unlink()
        reason = error if isinstance(error, OSError) else error.__context__ or error
        raise RuntimeError(
            f"The checkpoint {str(target)!r} could not be written: {reason}. Earlier ones are whole; make room "
            "or give another folder, and resume."
        ) from error


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
