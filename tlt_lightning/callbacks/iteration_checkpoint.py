"""Save a checkpoint every few minutes, where an iteration ends, and where a run is interrupted."""

import logging
import math
import time
from pathlib import Path
from typing import Annotated, Any

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from typing_extensions import override

from tlt_lightning.arguments import Bound, Count, checked, folder_of
from tlt_lightning.guard.files import set_aside
from tlt_lightning.training.fsdp2 import run_shards
from tlt_lightning.training.resume import begins_run, has_begun_update

log = logging.getLogger(__name__)


class IterationCheckpoint(ModelCheckpoint):
    """Saves after an iteration, or a warm-up's epoch, once `every_minutes` have passed, after the first and the last.

    Ctrl-C and SIGTERM save too: after an update at the iteration's end, in a rollout what was learned before it, in
    `interrupted.ckpt`, which goes with the next save of the resumed run. A kill loses at most these minutes and an
    iteration. Files are named by the iteration, counted from 0, and `last.ckpt` is a link
    to the latest. Unlike `ModelCheckpoint(train_time_interval)` it never saves amid an update.
    Checkpoints of another run in the folder are kept in `earlier_0`, which takes room.

    Args:
        dirpath: Folder of the checkpoints.
        every_minutes: Least time from a save to the next; 0 saves after each iteration.
        keep: Latest checkpoints that are kept; two, should the last update prove a bad one.
    """

    @checked()
    def __init__(self, dirpath: str, every_minutes: Annotated[float, Bound(0)] = 10.0, keep: Count = 2) -> None:
        super().__init__(
            folder_of("dirpath", dirpath),
            "{epoch}",
            monitor="step",
            mode="max",
            save_top_k=keep,
            save_last="link",
            every_n_epochs=1,
            save_on_train_epoch_end=True,
            enable_version_counter=False,
        )
        self.every_minutes = every_minutes
        self._forget_run()

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if begins_run(trainer):
            self._forget_run()

    def _forget_run(self) -> None:
        """Forget the checkpoints of a run that this callback has saved before: none of this one would be later."""
        self._last_global_step_saved, self._saved_at, self._owns_folder = 0, -math.inf, False
        self.best_k_models, self.best_model_score, self.current_score = {}, None, None
        self.kth_best_model_path = self.best_model_path = self.last_model_path = self._last_checkpoint_saved = ""

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._forget_run()
        super().load_state_dict(state_dict)

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._keep_earlier(trainer)

    @override
    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        is_last = trainer.should_stop or trainer.current_epoch + 1 == trainer.max_epochs
        is_last |= trainer.global_step == trainer.max_steps
        is_due = time.monotonic() - self._saved_at >= 60 * self.every_minutes
        liveness = getattr(trainer.datamodule, "liveness", None)  # type: ignore[attr-defined]
        is_due |= liveness is not None and liveness.is_told_to_end
        if trainer.strategy.reduce_boolean_decision(is_last or is_due, all=False):  # clocks and signals of ranks differ
            super().on_train_epoch_end(trainer, pl_module)
            self._saved_at = time.monotonic()
            if self._interrupted.exists() and not trainer.fast_dev_run:  # type: ignore[attr-defined]
                self._remove_checkpoint(trainer, str(self._interrupted))

    @override
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.fast_dev_run:  # type: ignore[attr-defined]  # Lightning would replace the last checkpoint of a run
            super().on_train_end(trainer, pl_module)

    def save_interrupted(self, trainer: L.Trainer) -> None:
        """Save what a run has learned that ends early, unless that is saved or takes other ranks, which may not come.

        `RunGuard` calls this; within an update nothing is saved, and a resumed run repeats the iteration.
        """
        is_new = trainer.global_step not in (0, self._last_global_step_saved) and not has_begun_update(trainer)
        if is_new and _is_resumable_alone(trainer) and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            ModelCheckpoint._save_checkpoint(self, trainer, str(self._interrupted))  # and wait for it
            self._save_last_checkpoint(trainer, self._monitor_candidates(trainer))
        is_whole = Path(self._last_checkpoint_saved).exists()  # unless the disk was full
        if self.last_model_path and is_whole and trainer.is_global_zero:
            log.info(
                "Interrupted after %d optimizer steps. To go on, give `--ckpt_path` %s, which holds %d of them.",
                *(trainer.global_step, self.last_model_path, self._last_global_step_saved),
            )

    @property
    def _interrupted(self) -> Path:
        return Path(str(self.dirpath)) / "interrupted.ckpt"

    def _keep_earlier(self, trainer: L.Trainer) -> None:
        """Set aside what another run has saved here, before any callback of this one saves; a collective."""
        if self._owns_folder or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        self._owns_folder = True
        folder, resumed = Path(str(self.dirpath)), Path(trainer.ckpt_path or "").resolve()
        goes_on = resumed.parent == folder or resumed.name.startswith("hpc_ckpt_")  # SLURM's requeue saves above it
        # Parts first: a run that is killed meanwhile leaves none without a checkpoint, for the next one to remove.
        earlier = [] if goes_on else [*folder.glob("*.ckpt.ranks"), *folder.glob("*.ckpt")]
        if trainer.is_global_zero:
            set_aside(folder, earlier, "checkpoints")
        trainer.strategy.barrier("earlier checkpoints")


def _is_resumable_alone(trainer: L.Trainer) -> bool:
    """Return True if a checkpoint that rank zero writes by itself resumes exactly, as after the end of a rank."""
    backlog = getattr(trainer.datamodule, "backlog", None)  # type: ignore[attr-defined]
    waits = backlog is not None and backlog.schedule.defers  # each rank has its own that wait
    return trainer.world_size == 1 or not (run_shards(trainer) or waits)
