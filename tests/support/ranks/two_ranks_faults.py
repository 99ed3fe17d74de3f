"""Run by tests/guard/test_callback.py, once per rank: three iterations in which a rank sends itself a signal."""

import os
import signal
import sys
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy

from tests.support.rl_runs import make_data
from tlt_lightning import RewardTerm, RLModule, RolloutCallback
from tlt_lightning.callbacks.iteration_checkpoint import IterationCheckpoint
from tlt_lightning.engine import TransformersEngine
from tlt_lightning.objectives import GRPO
from tlt_lightning.ranks import liveness


def length(prompt: str, response: str, row: dict) -> float:
    return float(len(response))


class Fault(RolloutCallback):
    """Sends `signal_name` to each of `ranks` at `place`.

    The place is `start` (while the engine is loaded), `rollout`, `update`, `checkpoint` or `stuck`: in the update,
    while rank 0 sits in what it does not come out of by itself.
    """

    def __init__(self, signal_name: str, ranks: str, place: str, out: Path) -> None:
        self.signal, self.place, self.out = signal.Signals[signal_name], place, out
        self.ranks = [int(rank) for rank in ranks.split(",")]

    def _at(self, place: str, trainer: L.Trainer) -> None:
        is_time = trainer.current_epoch == (2 if place == "rollout" else 1) or place == "start"
        if place == self.place and is_time and trainer.global_rank in self.ranks:
            if len(self.ranks) > 1:  # none is to hear of another's end before its own signal
                torch.distributed.barrier()
            os.kill(os.getpid(), self.signal)

    def on_engine_setup(self, trainer, pl_module, engine):
        self._at("start", trainer)
        if self.place == "start":
            time.sleep(3)  # loading is no collective

    def on_rollout_progress(self, trainer, pl_module, progress):
        if trainer.training:
            self._at("rollout", trainer)

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self._at("update", trainer)
        if self.place == "update":
            time.sleep(0.5)  # and the other hears of it before the update is done

    def on_train_batch_end(self, trainer, *_):
        if self.place == "stuck" and trainer.current_epoch == 1 and trainer.global_rank == 0:
            time.sleep(600)
        self._at("stuck", trainer)

    def on_save_checkpoint(self, trainer, *_):
        self._at("checkpoint", trainer)


def main(policy: str, prompts: str, out: str, signal_name: str, ranks: str, place: str) -> None:
    num_ranks = 1 if ranks == "0" else 2
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which what a shell runs behind `&` ignores
    if place == "stuck":
        liveness._GRACE_SECONDS = 1.0
    L.seed_everything(3)
    data = make_data(prompts, TransformersEngine(batch_size=4), val=None, rewards=[RewardTerm(function=length)])
    module = RLModule(policy, GRPO(), optimizer=lambda p: torch.optim.AdamW(p, lr=3e-3))
    trainer = L.Trainer(
        accelerator="cpu",
        devices=num_ranks,
        strategy="auto" if num_ranks == 1 else DDPStrategy(process_group_backend="gloo"),
        max_epochs=3,
        callbacks=[
            Fault(signal_name, ranks, place, Path(out)),
            ModelCheckpoint(Path(out) / "checkpoints"),
            IterationCheckpoint(f"{out}/iterations"),
            OnExceptionCheckpoint(out),
        ],
        logger=CSVLogger(out, name="", version="", flush_logs_every_n_steps=1),
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=out,
    )
    trainer.fit(module, data)


if __name__ == "__main__":
    main(*sys.argv[1:])
