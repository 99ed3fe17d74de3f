"""Keep a run's files whole and its end in order: RunGuard."""

import logging
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.utilities.exceptions import SIGTERMException
from typing_extensions import override

from tlt_lightning.guard.checkpoint_io import WholeCheckpointIO, remove_leftovers
from tlt_lightning.guard.folder_lock import FolderLock
from tlt_lightning.guard.interruption import Interruption
from tlt_lightning.guard.lightning_patches import apply_patches
from tlt_lightning.guard.parts import save_with_parts
from tlt_lightning.hooks import RolloutCallback
from tlt_lightning.ranks.liveness import SIGTERM_STATUS, Liveness
from tlt_lightning.replacing import replace
from tlt_lightning.training.iteration_end import CloseIteration
from tlt_lightning.training.resume import Requeue, forget_unfinished, has_begun_update, restart_validation

log = logging.getLogger(__name__)

_LAST_PATIENCE = 20.0  # seconds, after an error, for shards that other ranks may not write any more


def _skip(name: str | None = None) -> None:
    """Replace a barrier: wait for no other rank."""


def lifecycle_callbacks(trainer: L.Trainer) -> list[L.Callback]:
    """Return the callbacks that a run of this package needs and its Trainer has not; they leave it with the run."""
    has = {type(callback) for callback in trainer.callbacks}  # type: ignore[attr-defined]
    return [kind() for kind in (RunGuard, CloseIteration, Requeue) if kind not in has]


def protect(trainer: L.Trainer) -> None:
    """Let the Trainer's guard lock folders and handle signals, before a data module loads anything."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, RunGuard):
            callback.protect(trainer)


class RunGuard(RolloutCallback):
    """Guards a run against kills, signals and a second run; modules of this package bring it.

    - Checkpoints are written by `WholeCheckpointIO`, unless the Trainer was given a `CheckpointIO` plugin: those of a
      `ModelCheckpoint` while training goes on, which takes host memory of the size of one. One that cannot be written
      ends the run. `ModelCheckpoint(save_last="link")` replaces its link in one go.
    - A folder of checkpoints belongs to one run at a time; what a killed one left there half written is removed.
    - SIGTERM ends the run at the next engine step, with exit status 143, and so does Ctrl-C during training. An
      iteration whose update has begun is finished first, validation included, and saved by all ranks together; what
      takes longer than the system waits is lost, and that iteration is repeated. In a rollout checkpoint callbacks that
      have a method `save_interrupted` are called, as behind an error of a logger or callback where an iteration has
      ended, before that is saved. A second Ctrl-C ends the run at once. The end of another rank ends
      this one, too, with an error that names rank and reason.
    - A checkpoint that is saved on an error (`OnExceptionCheckpoint`) waits for no other rank.
    """

    def __init__(self) -> None:
        self._locks: dict[Path, FolderLock] = {}
        self._patches, self._after_error = ExitStack(), ExitStack()
        self._liveness: Liveness | None = None
        self._interruption: Interruption | None = None

    # Before anything is loaded, and once more for folders that are known later

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self.protect(trainer)
        if stage == "fit":
            forget_unfinished(trainer)

    @override
    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._lock_folders(trainer)

    def protect(self, trainer: L.Trainer) -> None:
        """Lock the Trainer's checkpoint folders, write its checkpoints, handle its SIGTERM; may be called again."""
        self._after_error.close()  # of an earlier run
        if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:  # both stay, for `Trainer.save_checkpoint`
            trainer.strategy.checkpoint_io = WholeCheckpointIO(trainer.global_rank)
            trainer.strategy.save_checkpoint = partial(save_with_parts, trainer)  # type: ignore[method-assign]
        apply_patches(trainer, self._patches)
        replace(self._patches, trainer.fit_loop, "min_epochs", trainer.fit_loop.min_epochs)  # which RLModule raises
        self._liveness = getattr(trainer.datamodule, "liveness", None)  # type: ignore[attr-defined]
        if self._liveness is not None:
            self._interruption = Interruption(self._liveness)
        # To the front: a report of an interrupted run names the checkpoint written here, and callbacks find the
        # metrics of an iteration that has ended.
        callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        callbacks.sort(key=lambda callback: not isinstance(callback, RunGuard | CloseIteration))
        if trainer.state.fn == "fit":
            self._lock_folders(trainer)

    def _lock_folders(self, trainer: L.Trainer) -> None:
        if not trainer.is_global_zero:
            return
        for callback in trainer.checkpoint_callbacks:
            given = getattr(callback, "dirpath", None)
            if given is None or "://" in str(given) or (folder := Path(given).resolve()) in self._locks:
                continue
            lock = FolderLock(folder)
            lock.take()
            self._locks[folder] = lock
            remove_leftovers(folder)

    # In the run

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._interruption is not None:
            self._interruption.listen()

    @override
    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._liveness is not None:
            self._liveness.check()

    def _check(self, trainer: L.Trainer, *_: Any) -> None:
        if self._liveness is not None:
            self._liveness.check(is_free=trainer.state.fn != "fit" or not has_begun_update(trainer))
        if isinstance(trainer.strategy.checkpoint_io, WholeCheckpointIO):
            trainer.strategy.checkpoint_io.check()

    on_rollout_progress = on_train_batch_start = on_validation_batch_start = _check  # type: ignore[assignment]

    # At its end

    @override
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if isinstance(trainer.strategy.checkpoint_io, WholeCheckpointIO):
            trainer.strategy.checkpoint_io.wait()  # a report at the end names what is there
        if self._interruption is not None:
            self._interruption.give_back()

    @override
    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        if isinstance(exception, SIGTERMException):
            exception.code = SIGTERM_STATUS  # Lightning's own has none, which is success
        if self._interruption is not None:
            self._interruption.give_back()
        if (mode := getattr(trainer._active_loop, "_module_mode", None)) is not None:
            mode.restore(pl_module)  # a validation that ends so leaves the policy in eval mode for another `fit`
        # `Trainer.save_checkpoint`, by which others save on an error, ends with a barrier, to which ranks may not come.
        replace(self._after_error, trainer.strategy, "barrier", _skip)
        try:
            if isinstance(trainer.strategy.checkpoint_io, WholeCheckpointIO):
                trainer.strategy.checkpoint_io.wait(_LAST_PATIENCE)
            self._save_interrupted(trainer)
        except RuntimeError as error:  # raising here would hide what ended the run
            log.error("%s", error)
        self._release()
        self._patches.close()  # Lightning calls no `teardown`

    def _save_interrupted(self, trainer: L.Trainer) -> None:
        is_training = trainer.state.fn == "fit" and not trainer.sanity_checking
        callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        is_at_end = any(isinstance(each, CloseIteration) and each.is_at_sound_end for each in callbacks)
        if not is_training or self._liveness is None or not (self._liveness.ends_itself or is_at_end):
            return
        for callback in trainer.checkpoint_callbacks:
            if save := getattr(callback, "save_interrupted", None):
                save(trainer)

    @override
    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._release()
        self._patches.close()
        hidden, callbacks = RunGuard | CloseIteration | Requeue, trainer.callbacks  # type: ignore[attr-defined]
        trainer.callbacks = [each for each in callbacks if not isinstance(each, hidden)]  # type: ignore[attr-defined]

    def _release(self) -> None:
        for lock in self._locks.values():
            lock.release()
        self._locks.clear()

    # Resuming

    @override
    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        restart_validation(checkpoint)
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, EarlyStopping) and callback.state_key in checkpoint["callbacks"]:
                checkpoint["callbacks"][callback.state_key]["patience"] = callback.patience  # not the checkpoint's
