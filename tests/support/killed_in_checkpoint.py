"""A run of two iterations that kills itself at the n-th change of a file under its folder of checkpoints."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import ModelCheckpoint

from tests.support.rollout_loop import LoggingModule, RolloutLoop, make_rollout, make_trainer
from tlt_lightning.guard.callback import RunGuard

EVENTS = ("open", "os.remove", "os.rename", "os.symlink", "os.truncate", "shutil.copyfile", "shutil.move")


def train(folder: str, kill_at: int | None = None, ckpt_path: str | None = None) -> None:
    """Train in `folder`; with `kill_at`, end by SIGKILL before the change of that number, counted from 1."""
    num_changes = 0

    def kill(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal num_changes
        if event in EVENTS and any(folder in str(argument) for argument in arguments[:2]):
            num_changes += 1
            if num_changes == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

    checkpoints = ModelCheckpoint(
        Path(folder) / "checkpoints", "{epoch}", save_last="link", save_on_train_epoch_end=True
    )
    trainer = make_trainer(
        Path(folder), [RunGuard(), checkpoints], enable_checkpointing=True, limit_val_batches=0, max_epochs=2
    )
    if kill_at is not None:
        sys.addaudithook(kill)
    trainer.fit(LoggingModule(), RolloutLoop(lambda _: [make_rollout(1.0)]), ckpt_path=ckpt_path)
