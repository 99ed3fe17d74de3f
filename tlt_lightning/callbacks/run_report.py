"""Report a run while it runs and at its end: a page to look at, key numbers as JSON, and places of its files."""

import json
import logging
import os
import random
import shlex
import time
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import SaveConfigCallback
from lightning.pytorch.utilities.exceptions import SIGTERMException
from typing_extensions import override

from tlt_lightning.arguments import CountOrZero, checked, folder_of
from tlt_lightning.callbacks.drafted_text import completion
from tlt_lightning.callbacks.progress_bar import say
from tlt_lightning.callbacks.report_page import columns, kept_details, page, rounded
from tlt_lightning.callbacks.rollout_timeline import RolloutTimeline, rank_timeline
from tlt_lightning.callbacks.run_facts import configuration, facts
from tlt_lightning.engine.base import RolloutProgress
from tlt_lightning.guard.files import part_of, set_aside
from tlt_lightning.hooks import RolloutCallback
from tlt_lightning.rollout import Rollout
from tlt_lightning.seeds import given_seed
from tlt_lightning.training.resume import begins_run, iterations_of

log = logging.getLogger(__name__)

SUMMARIZED = {
    "reward_mean": "reward/mean",
    "length_p50": "rollout/length_p50",
    "length_p99": "rollout/length_p99",
    "length_max": "rollout/length_max",
}
"""Values of the last iteration in `summary.json`, and the metric that each comes from."""

_EACH = 500
"""The page is written after each of the first so many iterations, then after every second, later after every third."""

History = Mapping[int, Mapping[str, float]]
"""The metrics by iteration."""


class RunReport(RolloutCallback):
    """Writes `report.html` after iterations, `summary.json` at the end, and says where files lie.

    The page is one file that opens from disk: reward, accuracy, lengths, where each second went, how old the text is
    that is learned from, speculation, and of up to 24 iterations the rollout from inside, the seconds of each rank
    and engine, and some completions, whose tokens show who drafted them. An interrupted run is reported too; a resumed
    run reports from its beginning, as everything is in the checkpoint. Another run's report in the folder is kept in
    `earlier_0`. `summary.json` has these keys, null where nothing was measured:

    - `seed`: The one that `seed_everything` set.
    - `iterations`, `seconds`: Finished iterations and wall-clock time since this callback was made (with the command
      line: before the engine is set up) or set up for another run, those before a resume included.
    - `held_out_accuracy_before`: Before training, if `num_sanity_val_steps` covered all held-out prompts.
    - `held_out_accuracy_after`, `held_out_accuracy_after_iteration`: The latest validation and its iteration.
    - `reward_mean`, `length_p50`, `length_p99`, `length_max`: Those of the last iteration; lengths in tokens.
    - `interrupted`: Whether an exception or Ctrl-C ended the run.

    Args:
        dirpath: Directory to write to; made if missing. Its name is the page's title.
        num_completions: Completions of an iteration on the page, drawn at random from rank zero's.

    Example:
        >>> trainer = L.Trainer(callbacks=[RunReport("outputs/quickstart")])  # doctest: +SKIP
    """

    @checked()
    def __init__(self, dirpath: str, num_completions: CountOrZero = 8) -> None:
        self.dirpath = Path(folder_of("dirpath", dirpath))
        self.num_completions = num_completions
        self._started = time.perf_counter()
        self._forget_run()

    def _forget_run(self) -> None:
        self.history: dict[int, dict[str, float]] = {}
        self._shown: dict[int, dict[str, float | None]] = {}  # of it, each rounded once: a page a time adds up
        self.details: dict[int, dict[str, Any]] = {}
        self.accuracy_before: float | None = None
        self._timeline = RolloutTimeline()
        self._completions: list[dict[str, Any]] = []
        self._head: dict[str, Any] = {}
        self._is_first_write = True  # of a run that does not go on from another
        self._earlier_seconds = 0.0

    # In the run

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._timeline.clear()  # of an iteration that was interrupted
        if begins_run(trainer):
            if self.history:
                self._started = time.perf_counter()
            self._forget_run()

    @override
    def on_sanity_check_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.history:
            return
        accuracy = trainer.callback_metrics.get("val/accuracy")
        # A part of the held-out prompts is not comparable with all of them.
        if accuracy is not None and trainer.num_sanity_val_batches == trainer.num_val_batches:
            self.accuracy_before = float(accuracy)

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._is_first_write &= trainer.ckpt_path is None
        self._head = {"facts": facts(trainer, pl_module), "config": configuration(trainer, pl_module)}

    @override
    def on_rollout_progress(self, trainer: L.Trainer, pl_module: L.LightningModule, progress: RolloutProgress) -> None:
        if trainer.is_global_zero and trainer.training:
            self._timeline.add(progress)

    @override
    def on_rollout_end(self, trainer: L.Trainer, pl_module: L.LightningModule, rollouts: Sequence[Rollout]) -> None:
        if trainer.is_global_zero and trainer.training:
            # A generator of its own: the sample repeats with the iteration and leaves the run's random numbers alone.
            chosen = random.Random(trainer.current_epoch)
            sample = chosen.sample(rollouts, min(self.num_completions, len(rollouts)))
            decode = trainer.datamodule.tokenizer.decode  # type: ignore[attr-defined]
            self._completions = [completion(rollout, decode) for rollout in sorted(sample, key=lambda r: -r.reward)]

    @override
    def on_iteration_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, iteration: int, metrics: dict[str, float]
    ) -> None:
        if trainer.fast_dev_run:  # type: ignore[attr-defined]  # leaves the report of a run in earnest alone
            return
        self.history[iteration] = dict(metrics)
        if not trainer.is_global_zero:
            return
        self._shown[iteration] = rounded(metrics)
        books: Any = pl_module.iteration_log
        ranks = [
            rank_timeline(laps, numbers.get("drafter/idle_seconds_used", 0.0))
            for laps, numbers in zip(books.laps_by_rank, books.by_rank, strict=True)
        ]
        engines = {name: rank_timeline(laps, 0.0) for name, laps in books.laps_by_engine.items()}
        shown = {"timeline": self._timeline.spans(), "ranks": ranks, "engines": engines}
        self.details[iteration] = {**shown, "completions": self._completions}
        self.details = {number: self.details[number] for number in sorted(kept_details(self.details))}
        self._timeline.clear()
        self._completions = []
        if iteration % (1 + iteration // _EACH) == 0:
            self._write_page(trainer, "running")

    # At its end

    @override
    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.is_global_zero and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            self._write(trainer, None)

    @override
    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        if not (trainer.is_global_zero and trainer.state.fn == "fit"):
            return
        if not self.history:
            if isinstance(exception, KeyboardInterrupt | SIGTERMException) and not _checkpoints(trainer):
                say("run interrupted before an iteration ended: nothing is saved, and the same command starts it again")
            return
        try:
            self._write(trainer, exception)
        except Exception:
            # Raising here would hide what ended the run and keep the engine from being closed.
            log.exception("The report of the interrupted run could not be written to %s.", self.dirpath)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {
            "history": {iteration: dict(values) for iteration, values in self.history.items()},
            "details": dict(self.details),
            "accuracy_before": self.accuracy_before,
            "seconds": self._seconds,
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.history = {int(iteration): dict(values) for iteration, values in state_dict["history"].items()}
        self._shown = {iteration: rounded(values) for iteration, values in self.history.items()}
        self.details = dict(state_dict["details"])
        self.accuracy_before = state_dict["accuracy_before"]
        self._earlier_seconds = state_dict["seconds"]
        self._is_first_write = False

    @property
    def _seconds(self) -> float:
        return self._earlier_seconds + time.perf_counter() - self._started

    def _keep_earlier(self) -> None:
        """Set aside what another run has written here, before this one writes for the first time."""
        if self._is_first_write:
            self._is_first_write = False
            paths = (self.dirpath / "report.html", self.dirpath / "summary.json")
            set_aside(self.dirpath, [path for path in paths if path.is_file()], "the report")

    def _write_page(self, trainer: L.Trainer, state: str) -> None:
        """Write the page in the place of the one before."""
        data = {
            "title": self.dirpath.absolute().name,
            "state": state,
            "written": f"{datetime.now():%Y-%m-%d %H:%M}",
            "seconds": round(self._seconds),
            "planned": trainer.max_epochs,
            "before": self.accuracy_before,
            **self._head,
            "iterations": sorted(self.history),
            "metrics": columns(self._shown),
            "details": self.details,
        }
        self._replace(self.dirpath / "report.html", page(data))

    def _replace(self, target: Path, text: str) -> None:
        """Replace a file in one go; one that cannot be written is no reason to end a run."""
        try:
            self.dirpath.mkdir(parents=True, exist_ok=True)
            self._keep_earlier()
            part_of(target).write_bytes(text.encode("utf-8", "replace"))  # a lone surrogate has no bytes
            os.replace(part_of(target), target)
        except OSError as error:
            log.warning("%s cannot be written, what it shows may be old: %s", target, error)
            with suppress(OSError):
                part_of(target).unlink()

    def _write(self, trainer: L.Trainer, exception: BaseException | None) -> None:
        measured = summarize(self.history, self.accuracy_before)
        is_interrupted = exception is not None
        summary = {"seed": given_seed(), **measured, "seconds": round(self._seconds, 3), "interrupted": is_interrupted}
        files = {"summary": self.dirpath / "summary.json", "report": self.dirpath / "report.html"}
        self._replace(files["summary"], json.dumps(summary, indent=2) + "\n")
        count, ended = summary["iterations"], "interrupted" if is_interrupted else "finished"
        lines = [f"run {ended} after {count} iteration{'s' * (count != 1)}"]
        checkpoints = _checkpoints(trainer)
        lines += [f"  checkpoint  {path}{_held_by(path)}" for path in checkpoints]
        folders = dict.fromkeys(logger.log_dir or logger.save_dir for logger in trainer.loggers)
        lines += [f"  metrics     {Path(folder)}" for folder in folders if folder]
        if self.history:
            self._write_page(trainer, "finished" if exception is None else f"interrupted by {type(exception).__name__}")
        lines += [f"  {name:11} {path}" for name, path in files.items() if path.is_file()]
        if checkpoints:
            path = shlex.quote(checkpoints[-1])
            lines += [
                f"  to go on    {_again(trainer, checkpoints[-1], is_over=not is_interrupted)}",
                f"  to serve    python -m tlt_lightning export --ckpt_path {path} --output_dir <new folder>",
            ]
        say("\n".join(lines))


def summarize(history: History, accuracy_before: float | None) -> dict[str, Any]:
    """Return the measured keys of `summary.json` (see `RunReport`)."""
    last = history[max(history)] if history else {}
    validated = [iteration for iteration in sorted(history) if "val/accuracy" in history[iteration]]
    return {
        "iterations": max(history, default=0),
        "held_out_accuracy_before": accuracy_before,
        "held_out_accuracy_after": history[validated[-1]]["val/accuracy"] if validated else None,
        "held_out_accuracy_after_iteration": validated[-1] if validated else None,
        **{name: last.get(metric) for name, metric in SUMMARIZED.items()},
    }


def _checkpoints(trainer: L.Trainer) -> list[str]:
    callbacks = [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]
    paths = [callback.last_model_path or callback.best_model_path for callback in callbacks]
    here = f"{Path.cwd()}{os.sep}"
    return [path.removeprefix(here) for path in paths if path and Path(path).exists()]


def _held_by(path: str) -> str:
    """Return what a checkpoint holds, in brackets; "" if it cannot be read."""
    count = iterations_of(path)
    return "" if count is None else f" (after {count} iteration{'s' * (count != 1)})"


def _again(trainer: L.Trainer, path: str, *, is_over: bool) -> str:
    """Return the command that goes on from a checkpoint: the one that was given, or Python's."""
    callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    if any(isinstance(callback, SaveConfigCallback) for callback in callbacks):  # the command line's
        replaced = ArgumentParser(add_help=False, allow_abbrev=False)
        for option in ("--ckpt_path", *["--trainer.max_epochs"] * is_over):
            replaced.add_argument(option)
        words = shlex.join(["python", "-m", "tlt_lightning", *replaced.parse_known_args()[1], "--ckpt_path", path])
        return words + " --trainer.max_epochs <more>" * is_over
    return f"L.Trainer({'max_epochs=<more>, ' * is_over}...).fit(module, data, ckpt_path={path!r})"
