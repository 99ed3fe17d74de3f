import csv
import multiprocessing
import os
import signal
from pathlib import Path

from lightning.pytorch.loggers import CSVLogger

from tlt_lightning.guard.metrics_file import protect_rows


def log_rows(folder: Path, *, is_killed: bool) -> None:
    """Log three rows, a new column in the third, and be killed where the file is being written anew."""
    logger = CSVLogger(folder, name="", version="", flush_logs_every_n_steps=1)
    protect_rows(logger)
    for step in (0, 1):
        logger.log_metrics({"loss": 1.0}, step)
    if is_killed:
        csv.DictWriter.writeheader = lambda _: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
    logger.log_metrics({"loss": 1.0, "accuracy": 0.5}, 2)


def test_a_kill_while_a_column_is_added_loses_no_row(tmp_path: Path) -> None:
    for is_killed in (True, False):
        folder = tmp_path / str(is_killed)
        context = multiprocessing.get_context("fork")
        process = context.Process(target=log_rows, args=(folder,), kwargs={"is_killed": is_killed})
        process.start()
        process.join(60)
        with open(folder / "metrics.csv", newline="") as file:
            losses = [row["loss"] for row in csv.DictReader(file)]
        assert (process.exitcode, losses) == ((-signal.SIGKILL, ["1.0"] * 2) if is_killed else (0, ["1.0"] * 3))
