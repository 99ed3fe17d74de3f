"""A callback for a run that another process sends a signal."""

import time
from pathlib import Path
from typing import Any

import lightning as L


class Waits(L.Callback):
    """Tells that a batch is done, and waits until the signal has been sent.

    Args:
        stage: `train` or `validation`.
        epoch: From 0.
        batch: Of the epoch, from 0.
        told: File that is made, and removed by who sends it.
    """

    def __init__(self, stage: str, epoch: int, batch: int, told: str) -> None:
        self.stage, self.place, self.told = stage, (epoch, batch), told

    def _wait(self, stage: str, trainer: L.Trainer, batch: int) -> None:
        if (stage, (trainer.current_epoch, batch)) == (self.stage, self.place):
            Path(self.told).touch()
            while Path(self.told).exists():
                time.sleep(0.05)

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._wait("train", trainer, batch_idx)

    def on_validation_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, index: int) -> None:
        self._wait("validation", trainer, index)
