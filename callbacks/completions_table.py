"""Keep a sample of what the policy wrote in each iteration, for reading."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L

from tlt_lightning import Rollout, RolloutCallback

COLUMNS = ["reward", "tokens", "finish_reason", "prompt", "response", "answer"]


class CompletionsTable(RolloutCallback):
    """Writes sampled completions to a JSONL file per iteration, and to the logger as a table.

    Weights & Biases and MLflow get a table, TensorBoard gets text; loggers with no place for either, such as CSV, are
    left out. Only rank zero writes, from its own rollouts of training.

    Args:
        dirpath: Directory of the files `iteration_00001.jsonl`, ...; made if missing.
        num_samples: Completions per iteration, drawn anew each time.
        every_n_iterations: Write in every n-th iteration.

    Example:
        callbacks+:
          - class_path: tlt_lightning.gallery.completions_table.CompletionsTable
            init_args: {dirpath: outputs/completions, num_samples: 8, every_n_iterations: 5}
    """

    def __init__(self, dirpath: str, num_samples: int = 8, every_n_iterations: int = 1) -> None:
        if num_samples < 1:
            raise ValueError(f"`num_samples` must be at least 1, got {num_samples}.")
        if every_n_iterations < 1:
            raise ValueError(f"`every_n_iterations` must be at least 1, got {every_n_iterations}.")
        self.dirpath = Path(dirpath)
        self.num_samples = num_samples
        self.every_n_iterations = every_n_iterations

    def on_rollout_end(self, trainer: L.Trainer, pl_module: L.LightningModule, rollouts: Sequence[Rollout]) -> None:
        """Sample, then write to the file and to the loggers."""
        iteration = trainer.current_epoch + 1
        if not (trainer.training and trainer.is_global_zero) or iteration % self.every_n_iterations:
            return
        # A generator of its own: the sample repeats with the iteration and draws nothing from the run's random numbers.
        sample = random.Random(iteration).sample(rollouts, min(self.num_samples, len(rollouts)))
        rows = [rollout.to_row() for rollout in sorted(sample, key=lambda rollout: -rollout.reward)]
        self.dirpath.mkdir(parents=True, exist_ok=True)
        with open(self.dirpath / f"iteration_{iteration:05}.jsonl", "w") as file:
            # `default=str`, because an answer column may hold a date or a number of another library.
            file.writelines(json.dumps({"iteration": iteration, **row}, default=str) + "\n" for row in rows)
        for logger in trainer.loggers:
            _log_table(logger, [[row[column] for column in COLUMNS] for row in rows], trainer.current_epoch)


def _log_table(logger: Any, cells: list[list[Any]], step: int) -> None:
    if hasattr(logger, "log_table"):
        logger.log_table("completions", columns=COLUMNS, data=cells, step=step)
    elif hasattr(logger.experiment, "log_table"):  # MLflow's client, which appends to the file
        columns = {name: [row[i] for row in cells] for i, name in enumerate(COLUMNS)}
        logger.experiment.log_table(logger.run_id, columns, "completions.json")
    elif hasattr(logger.experiment, "add_text"):
        logger.experiment.add_text("completions", _markdown(cells), step)


def _markdown(cells: list[list[Any]]) -> str:
    lines = [COLUMNS, ["---"] * len(COLUMNS), *cells]
    return "\n".join("| " + " | ".join(_markdown_cell(cell) for cell in line) + " |" for line in lines)


def _markdown_cell(cell: Any) -> str:
    text = f"{cell:.3f}" if isinstance(cell, float) else str(cell)
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", "<br>")
