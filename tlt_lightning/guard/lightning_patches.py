"""Replace parts of Lightning while a run lasts; docs/trainer.md shows this table."""

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from types import FrameType, MethodType
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint

from tlt_lightning.guard.checkpoint_io import link_checkpoint, save_behind
from tlt_lightning.replacing import replace
from tlt_lightning.training.followed_metrics import save_followed
from tlt_lightning.training.resume import Requeue


@dataclass(frozen=True, slots=True)
class Patch:
    """Replaces one attribute of objects of Lightning, from a run's setup to its teardown.

    Args:
        attribute: Class and name.
        why: What Lightning's own does to a run.
        owners: Returns the Trainer's objects that have it.
        instead: What is called in its place, with the object before the method's own arguments.
    """

    attribute: str
    why: str
    owners: Callable[[L.Trainer], Iterable[Any]]
    instead: Callable[..., Any]


def _savers(trainer: L.Trainer) -> Iterable[ModelCheckpoint]:
    return [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]


def _signals(trainer: L.Trainer) -> Iterable[Any]:
    return [trainer._signal_connector] if getattr(trainer.datamodule, "liveness", None) is not None else []  # type: ignore[attr-defined]


def _requeued(trainer: L.Trainer) -> Iterable[Any]:
    callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return [trainer._signal_connector] if any(isinstance(callback, Requeue) for callback in callbacks) else []


def _savers_of_iterations(trainer: L.Trainer) -> Iterable[ModelCheckpoint]:
    return _savers(trainer) if hasattr(trainer.lightning_module, "validated") else []


def _save_nothing(*_: Any) -> None:
    """Replace `ModelCheckpoint.on_validation_end`; `_save_at_end` calls it."""


def _save_at_end(saver: ModelCheckpoint, trainer: L.Trainer, module: Any) -> None:
    """Replace `ModelCheckpoint.on_train_epoch_end`: save what is due there or was due behind the validation."""
    type(saver).on_train_epoch_end(saver, trainer, module)
    if module.validated:
        type(saver).on_validation_end(saver, trainer, module)


def _terminate(connector: Any, signum: Any, frame: FrameType | None) -> None:
    if connector.trainer.strategy.launcher is not None:
        connector.trainer.strategy.launcher.kill(signum)
    connector.trainer.datamodule.liveness.terminate()


def _requeue(connector: Any, signum: Any, frame: FrameType | None) -> None:
    (requeue,) = (callback for callback in connector.trainer.callbacks if isinstance(callback, Requeue))
    requeue.handle(partial(type(connector)._slurm_sigusr_handler_fn, connector, signum, frame))


PATCHES = (
    Patch(
        "ModelCheckpoint._link_checkpoint",
        "removes the link `last.ckpt` before it makes the next: a kill between the two leaves none",
        _savers,
        link_checkpoint,
    ),
    Patch(
        "ModelCheckpoint._save_checkpoint",
        "lets training wait until the file is written",
        _savers,
        save_behind,
    ),
    Patch(
        "ModelCheckpoint._save_monitor_checkpoint",
        "saves nothing, with a warning, for want of its metric; removes none in a run that is resumed with a smaller "
        "`save_top_k`",
        _savers,
        save_followed,
    ),
    Patch(
        "ModelCheckpoint.on_validation_end",
        "saves an iteration behind its validation, before it has ended, from where no run goes on exactly",
        _savers_of_iterations,
        _save_nothing,
    ),
    Patch(
        "ModelCheckpoint.on_train_epoch_end",
        "saves at an iteration's end, but not what its validation has asked for",
        _savers_of_iterations,
        _save_at_end,
    ),
    Patch(
        "_SignalConnector._sigterm_notifier_fn",
        "calls a collective from inside SIGTERM's handler, in which ranks wait for each other without end",
        _signals,
        _terminate,
    ),
    Patch(
        "_SignalConnector._slurm_sigusr_handler_fn",
        "saves and requeues wherever SLURM's signal comes, also amid an optimizer step",
        _requeued,
        _requeue,
    ),
)


def apply_patches(trainer: L.Trainer, undone: ExitStack) -> None:
    """Replace what `PATCHES` names in a Trainer's objects until `undone` is closed."""
    for patch in PATCHES:
        for owner in patch.owners(trainer):
            replace(undone, owner, patch.attribute.partition(".")[2], MethodType(patch.instead, owner))
