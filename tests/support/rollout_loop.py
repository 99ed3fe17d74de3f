"""The real loop's timing (lazy, sized, one epoch an iteration) in a Trainer, with rollouts made up by the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from tlt_lightning.engine.base import RolloutProgress
from tlt_lightning.hooks import call_rollout_hook
from tlt_lightning.metrics import IterationLog
from tlt_lightning.metrics.rollouts import log_rollouts
from tlt_lightning.rollout import Prompt, Response, Rollout

MakeRollouts = Callable[[int], Sequence[Rollout]]


def make_rollout(reward: float, length: int = 4, group: int = 0, text: str = "so 2 + 3", cut: bool = False) -> Rollout:
    response = Response(group, list(range(length)), [-0.5] * length, "length" if cut else "stop", (0,))
    return Rollout(Prompt("2 3 = 5", [2, 3], answer="2 + 3"), response, text, group, {"exact": reward}, reward)


def progress(waiting: int = 1, running: int = 2, finished: int = 3, **other: Any) -> RolloutProgress:
    values = {"tokens": 600, "longest": 128, "elapsed": 2.0, **other}
    return RolloutProgress(waiting=waiting, running=running, finished=finished, **values)


class LazyRollouts:
    """Dispatches the hooks of one rollout when the first minibatch is asked for."""

    def __init__(self, data: RolloutLoop, num_batches: int) -> None:
        self.data = data
        self.num_batches = num_batches

    def __len__(self) -> int:
        return self.num_batches

    def __iter__(self) -> Iterator[Tensor]:
        trainer = self.data.trainer
        assert trainer is not None
        call_rollout_hook(trainer, "on_rollout_start")
        for step in self.data.progress:
            call_rollout_hook(trainer, "on_rollout_progress", step)
        rollouts = self.data.make_rollouts(trainer.current_epoch + 1 if trainer.training else 0)
        if trainer.training:
            self.data.rollouts = rollouts
        call_rollout_hook(trainer, "on_rollout_end", rollouts)
        for _ in range(self.num_batches):
            yield torch.ones(1, 1)


class RolloutLoop(L.LightningDataModule):
    """Stands in for `RolloutDataModule`.

    Args:
        make_rollouts: Returns the rollouts of an iteration, counted from 1; 0 is validation or prediction.
        progress: What the engine reports in each rollout.
    """

    def __init__(self, make_rollouts: MakeRollouts, progress: Sequence[RolloutProgress] = ()) -> None:
        super().__init__()
        self.make_rollouts = make_rollouts
        self.progress = progress
        self.rollouts: Sequence[Rollout] = ()
        self.tokenizer = SimpleNamespace(decode=lambda ids: " ".join(map(str, ids)))

    def train_dataloader(self) -> LazyRollouts:
        return LazyRollouts(self, num_batches=2)

    def val_dataloader(self) -> LazyRollouts:
        return LazyRollouts(self, num_batches=3)

    test_dataloader = val_dataloader

    def predict_dataloader(self) -> LazyRollouts:
        return LazyRollouts(self, num_batches=1)


class LoggingModule(L.LightningModule):
    """Logs where and when `RLModule` does; its held-out accuracy is 0.2 before training and then the iteration's tenth.

    Args:
        fail_in_iteration: Raise RuntimeError in the second minibatch of this iteration.
    """

    def __init__(self, fail_in_iteration: int | None = None) -> None:
        super().__init__()
        self.fail_in_iteration = fail_in_iteration
        self.layer = nn.Linear(1, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.current_epoch + 1 == self.fail_in_iteration and batch_idx == 1:
            raise RuntimeError("made to fail")
        return self.layer(batch).sum()

    def on_train_epoch_start(self) -> None:
        self.validated: dict[str, float] = {}

    def on_train_epoch_end(self) -> None:
        data: Any = self.trainer.datamodule  # type: ignore[attr-defined]
        self.iteration_log = log = IterationLog()
        for stage, seconds in (("sync", 0.5), ("rollout", 2.0), ("update", 1.0)):
            log.charge(stage, seconds)
        log_rollouts(log, data.rollouts)
        log.update({"train/loss": 1.0, "rollout/tokens_per_s": 1234.0})
        metrics = log.close(self.trainer)
        self.log_dict(metrics)
        metrics |= self.validated
        call_rollout_hook(self.trainer, "on_iteration_end", self.current_epoch + 1, metrics)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        accuracy = 0.2 if self.trainer.sanity_checking else 0.1 * (self.current_epoch + 1)
        self.log("val/accuracy", accuracy, batch_size=1)
        self.validated = {"val/accuracy": accuracy}

    test_step = validation_step

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return batch

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def make_trainer(path: Path, callbacks: list[L.Callback], **settings: Any) -> L.Trainer:
    """A quiet CPU Trainer with validation every second iteration and nothing of its own on the screen."""
    defaults: dict[str, Any] = {
        "max_epochs": 3,
        "check_val_every_n_epoch": 2,
        "num_sanity_val_steps": -1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "log_every_n_steps": 1,
    }
    return L.Trainer(
        accelerator="cpu", devices=1, default_root_dir=path, callbacks=callbacks, **{**defaults, **settings}
    )
