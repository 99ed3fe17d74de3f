"""Bring the callbacks that a run is expected to have."""

import os
from importlib import import_module
from pathlib import Path

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint

from tlt_lightning.callbacks.completions_writer import CompletionsWriter
from tlt_lightning.callbacks.iteration_checkpoint import IterationCheckpoint
from tlt_lightning.callbacks.progress_bar import RolloutProgressBar
from tlt_lightning.callbacks.run_report import RunReport


def folder_of_run(root: str | os.PathLike[str] | None) -> Path:
    """Return where a run with this `default_root_dir` writes: `outputs` in place of the working directory."""
    folder = Path(root or Path.cwd()).expanduser()
    return folder / "outputs" if folder == Path.cwd() else folder


def usual_callbacks(trainer: L.Trainer) -> list[L.Callback]:
    """Return the callbacks that a Trainer was neither given nor told to do without, and drop its own checkpoint.

    - A `RolloutProgressBar`, unless `enable_progress_bar=False`.
    - A `RunReport`, in `predict` also a `CompletionsWriter`, unless `logger=False`.
    - The gallery's `WhyNothingIsLearned`.
    - An `IterationCheckpoint` in place of Lightning's own checkpoint, unless `enable_checkpointing=False`.

    They write to the Trainer's `default_root_dir`; to `outputs` where that is the working directory.
    """
    given: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    folder = str(folder_of_run(trainer.default_root_dir))
    usual: list[L.Callback] = [import_module("tlt_lightning.gallery.why_nothing_is_learned").WhyNothingIsLearned()]
    if trainer.progress_bar_callback is not None:
        usual.append(RolloutProgressBar())
    if trainer.loggers:
        usual.append(RunReport(folder))
    if trainer.loggers and trainer.state.fn == "predict":
        usual.append(CompletionsWriter(folder))
    if [vars(each) for each in trainer.checkpoint_callbacks] == [vars(ModelCheckpoint())]:  # the Trainer's own
        given.remove(trainer.checkpoint_callbacks[0])  # which Lightning would do, and say so
        usual.append(IterationCheckpoint(f"{folder}/checkpoints"))
    names = {kind.__name__ for each in given for kind in type(each).__mro__}  # a file may be known by two paths
    return [each for each in usual if type(each).__name__ not in names]
