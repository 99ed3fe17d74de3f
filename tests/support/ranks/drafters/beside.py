"""Run by long_tail/test_two_ranks.py, once per rank: rank 0 writes short answers and trains the drafter meanwhile.

Nothing depends on the clock. Rank 1 goes on writing once rank 0 is in the last of `NUM_STEPS` micro-steps, which ends
when rank 1 has written all: were either to wait for more of the other, the run would not end. Modes: `run`; and `die`,
in which rank 0 is killed while it trains.
"""

import json
import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import lightning as L
import torch
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.strategies import DDPStrategy

from tests.support import rl_runs
from tests.support.drafters.drafter_runs import fixed
from tlt_lightning import RLModule, RolloutCallback, RolloutDataModule, Sampling
from tlt_lightning.drafter.module import DrafterModule
from tlt_lightning.drafter.packing import PackedBatch
from tlt_lightning.engine import VLLMEngine
from tlt_lightning.engine.vllm.speculation import Speculation
from tlt_lightning.long_tail.budget import FixedBudget
from tlt_lightning.long_tail.callback import LongTailIdleCallback
from tlt_lightning.objectives import GRPO
from tlt_lightning.ranks.idle_windows import IdleWindow
from tlt_lightning.rollout import Request, Response

SHORT, LONG = 16, 48
NUM_STEPS, NUM_ITERATIONS = 4, 4


class UnevenEngine(VLLMEngine):
    """Writes `SHORT` tokens on rank 0 and `LONG` on rank 1."""

    def generate(self, requests: Sequence[Request], sampling: Sampling, **rest) -> Iterator[Response]:
        limit = (SHORT, LONG)[torch.distributed.get_rank()]
        return super().generate([replace(request, max_tokens=limit) for request in requests], sampling, **rest)


class StagedDrafter(DrafterModule):
    """Holds its window open until the `NUM_STEPS`-th micro-step; drafts a token once it was trained, and never two."""

    marker: Path
    untrained: float
    window: IdleWindow | None = None
    num_steps = 0

    def loss(self, batch: PackedBatch, *, compares: bool = True) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        self.num_steps += 1
        if self.window is not None and self.num_steps >= NUM_STEPS:
            self.marker.touch()
            while self.window.is_open():
                time.sleep(0.005)
        return super().loss(batch, compares=compares)

    def measure(self, batch: PackedBatch) -> torch.Tensor:
        sums = super().measure(batch)
        sums[:, 0] = 0.0
        if self.is_trained():
            sums[:, 0, 0] = sums[:, 1, 0]
        return sums

    def checksum(self) -> float:
        return sum(tensor.double().sum().item() for _, tensor in self.trainable_tensors())

    def is_trained(self) -> bool:
        return self.checksum() != self.untrained


class Observer(RolloutCallback):
    """Stages the windows, and notes what there was; stands before the drafter's callback."""

    def __init__(self, out: Path, drafting: LongTailIdleCallback, mode: str) -> None:
        self.out, self.drafting, self.mode = out, drafting, mode
        self.own: list[dict[str, float]] = []
        self.rows: list[dict[str, float]] = []

    def on_train_start(self, trainer, pl_module):
        self.drafting.drafter.untrained = self.drafting.drafter.checksum()

    def on_rollout_idle(self, trainer, pl_module, window):
        drafter = self.drafting.drafter
        drafter.num_steps, drafter.window = 0, window
        drafter.marker = self.out / f"last_step{trainer.current_epoch}"

    def on_rollout_progress(self, trainer, pl_module, progress):
        if trainer.global_rank == 0 or not trainer.current_epoch:  # the first iteration has nothing to learn from
            return
        event = self.out / ("killed" if self.mode == "die" else f"last_step{trainer.current_epoch}")
        while not event.exists():
            time.sleep(0.005)
        if self.mode == "die":
            time.sleep(1)  # of each engine step: the death is noticed long before the rollout ends

    def on_rollout_end(self, trainer, pl_module, rollouts):
        (self.out / f"wrote{trainer.global_rank}_{trainer.current_epoch}").touch()
        stats = trainer.datamodule.engine.stats()
        _, num_steps = pl_module.iteration_log.read().get("drafter/micro_steps", ("sum", 0.0))
        self.own.append({"version": stats["speculation/drafter_version"], "steps": num_steps})

    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch:
            self.rows.append({name: float(value) for name, value in trainer.callback_metrics.items()})

    def on_train_end(self, trainer, pl_module):
        self.on_train_epoch_start(trainer, pl_module)
        state = {"own": self.own, "rows": self.rows, "weights": self.drafting.drafter.checksum()}
        (self.out / f"rank{trainer.global_rank}.json").write_text(json.dumps(state))


def die(out: Path) -> None:
    (out / "killed").touch()
    os.kill(os.getpid(), signal.SIGKILL)


def make_data(prompts: str) -> RolloutDataModule:
    speculation = Speculation(selector=fixed(), cold_head=True, max_draft_tokens=3)
    engine = UnevenEngine(
        dtype="float32", kv_cache_gib=0.0625, max_num_seqs=16, enforce_eager=True, speculation=speculation
    )
    sampling = Sampling(max_tokens=LONG)
    return rl_runs.make_data(prompts, engine, val=None, micro_batch_tokens=256, num_minibatches=1, sampling=sampling)


def make_trainer(out: Path, max_epochs: int, *callbacks: L.Callback) -> L.Trainer:
    return L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(process_group_backend="gloo"),
        max_epochs=max_epochs,
        callbacks=list(callbacks),
        logger=False,
        limit_val_batches=0,
        enable_checkpointing=any(isinstance(callback, Checkpoint) for callback in callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=out,
    )


def make_module(policy: str) -> RLModule:
    return RLModule(policy, GRPO(), optimizer=lambda p: torch.optim.AdamW(p, lr=1e-4))


def main(policy: str, prompts: str, out: str, mode: str) -> None:
    L.seed_everything(3)
    drafter = StagedDrafter(policy, optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2))
    drafting = LongTailIdleCallback(drafter, pack_tokens=128, max_passes=1000, budget=FixedBudget(0.0))
    if mode == "die" and os.environ["LOCAL_RANK"] == "0":
        loss, calls = drafter.loss, iter([False])  # the first call is the step that is tried before the run
        drafter.loss = lambda batch, **rest: die(Path(out)) if next(calls, True) else loss(batch, **rest)
    trainer = make_trainer(Path(out), NUM_ITERATIONS, Observer(Path(out), drafting, mode), drafting)
    trainer.fit(make_module(policy), make_data(prompts))
