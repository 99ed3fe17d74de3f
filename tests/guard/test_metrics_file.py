import csv
import multiprocessing
import os
import signal
import sys
from pathlib import Path

from lightning.pytorch.loggers import CSVLogger

from tlt_lightning.guard.metrics_file import protect_rows


def log_rows(folder: Path, kill_at: int) -> None:
    """Log three rows, a new column in the third, and be killed at the n-th opening or renaming of a file from then."""
    logger = CSVLogger(folder, name="", version="", flush_logs_every_n_steps=1)
    protect_rows(logger)
    for step in (0, 1):
        logger.log_metrics({"loss": 1.0}, step)
    num_changes = 0

    def kill(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal num_changes
        if event in ("open", "os.rename") and str(folder) in str(arguments[0]):
            num_changes += 1
            if num_changes > kill_at:  # after the change
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(kill)
    logger.log_metrics({"loss": 1.0, "accuracy": 0.5}, 2)


def test_a_kill_while_a_column_is_added_loses_no_row(tmp_path: Path) -> None:
    context, num_rows = multiprocessing.get_context("fork"), []
    for kill_at in range(10):
        process = context.Process(target=log_rows, args=(tmp_path / str(kill_at), kill_at))
        process.start()
        process.join(60)
        with open(tmp_path / str(kill_at) / "metrics.csv", newline="") as file:
            num_rows.append(len([row for row in csv.DictReader(file) if row["loss"]]))
        if process.exitcode == 0:
            break
    assert set(num_rows[:-1]) == {2}
    assert num_rows[-1] == 3
    assert len(num_rows) > 3
