"""A run of two iterations that copies its folder before each change of a file in it: what a kill would leave."""

import shutil
import sys
import threading
from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import ModelCheckpoint

from tests.support.rollout_loop import LoggingModule, RolloutLoop, make_rollout, make_trainer
from tlt_lightning.guard.callback import RunGuard

EVENTS = ("open", "os.remove", "os.rename", "os.symlink", "os.truncate", "shutil.copyfile", "shutil.move")


def train(folder: str, copies: str | None = None) -> None:
    """Train in `folder`; copy it to the folder `copies`, numbered from 1, before each change."""
    lock, owner, num_copies = threading.Lock(), 0, 0

    def copy(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal owner, num_copies
        if threading.get_ident() == owner or event not in EVENTS:
            return
        if any(folder in str(argument) for argument in arguments[:2]):
            with lock:
                owner = threading.get_ident()
                num_copies += 1
                shutil.copytree(folder, f"{copies}/{num_copies}", symlinks=True)
                owner = 0

    checkpoints = ModelCheckpoint(
        Path(folder) / "checkpoints", "{epoch}", save_last="link", save_on_train_epoch_end=True
    )
    trainer = make_trainer(
        Path(folder), [RunGuard(), checkpoints], enable_checkpointing=True, limit_val_batches=0, max_epochs=2
    )
    if copies is not None:
        sys.addaudithook(copy)
    trainer.fit(LoggingModule(), RolloutLoop(lambda _: [make_rollout(1.0)]))
