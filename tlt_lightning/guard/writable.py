"""Check that a run can write to its folders, before anything is loaded."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.cli import SaveConfigCallback
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException


def check_folders(trainer: L.Trainer, others: Sequence[L.Callback] = ()) -> None:
    """Raise MisconfigurationException if a folder of a callback or logger cannot be made or written to."""
    if not trainer.is_global_zero:
        return
    for name, folder in _folders(trainer, others):
        if reason := _obstacle(Path(os.path.abspath(folder))):
            raise MisconfigurationException(
                f"`{name}` {str(folder)!r} cannot be written to: {reason}. Give a folder that can, for example by "
                "`--trainer.default_root_dir`, below which recipes put all that a run writes."
            )


def _folders(trainer: L.Trainer, others: Sequence[L.Callback]) -> Iterator[tuple[str, Any]]:
    callbacks: list[L.Callback] = [*trainer.callbacks, *others]  # type: ignore[attr-defined]
    local = [logger for logger in trainer.loggers if isinstance(logger, CSVLogger | TensorBoardLogger)]
    given = [(f"{type(each).__name__}.dirpath", getattr(each, "dirpath", None)) for each in callbacks]
    given += [(f"{type(each).__name__}.save_dir", each.save_dir) for each in local]
    if not trainer.loggers and any(isinstance(each, SaveConfigCallback) for each in callbacks):
        given.append(("trainer.default_root_dir", trainer.default_root_dir))
    return ((name, folder) for name, folder in given if isinstance(folder, str | Path) and "://" not in str(folder))


def _obstacle(folder: Path) -> str:
    """Return why an absolute path can be no folder that is written to; "" if it can."""
    place = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    if not place.exists():
        return f"{str(place)!r} is a link to {os.readlink(place)!r}, which is missing"
    if not place.is_dir():
        return f"{str(place)!r} is no folder"
    return "" if os.access(place, os.W_OK | os.X_OK) else f"{str(place)!r} may not be written to"
