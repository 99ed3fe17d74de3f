"""Let Lightning's CSVLogger replace its file in one go, and a run that does not begin leave none."""

from __future__ import annotations

import csv
import os
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger

from tlt_lightning.guard.files import part_of


def protect_rows(logger: CSVLogger) -> None:
    """Keep the rows of `logger` if the process is killed while their file is written anew.

    Lightning opens the file for writing, which empties it, and writes the rows it has read.
    """
    writer: Any = logger.experiment
    if "://" not in writer.metrics_file_path:
        writer._rewrite_with_new_header = partial(_rewrite, Path(writer.metrics_file_path))


def remove_unused(loggers: Sequence[Logger]) -> None:
    """Remove the folders that loggers have made for a run which does not begin, unless they hold anything else."""
    for logger in loggers:
        if not isinstance(logger, CSVLogger | TensorBoardLogger) or "://" in logger.log_dir:
            continue
        folder = Path(logger.log_dir)
        if isinstance(logger, TensorBoardLogger):
            logger.experiment.close()
            for events in folder.glob(f"events.out.tfevents.*.{os.getpid()}.*"):
                events.unlink()
        with suppress(OSError):  # it is not empty
            folder.rmdir()


def _rewrite(path: Path, fieldnames: list[str]) -> None:
    part = part_of(path)
    with open(path, newline="") as rows, open(part, "w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=fieldnames)
        writer.writeheader()
        writer.writerows(csv.DictReader(rows))
    os.replace(part, path)
