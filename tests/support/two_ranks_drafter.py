"""Run by test_long_tail_two_ranks.py, once per rank: rank 0 writes short answers and trains the drafter meanwhile.

Modes: `run`, which from iteration `NUM_LEARNING` on trains in every second iteration and changes nothing thereby; and
`die`, in which rank 0 is killed while it trains.
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

from tests.support.drafter_runs import fixed
from tlt_lightning import PromptSource, RewardTerm, RLModule, RolloutCallback, RolloutDataModule, Sampling
from tlt_lightning.drafter.module import DrafterModule
from tlt_lightning.engine import Request, Response, VLLMEngine
from tlt_lightning.engine.vllm.speculation import Speculation
from tlt_lightning.long_tail import trainer as trainer_of_drafters
from tlt_lightning.long_tail.callback import LongTailIdleCallback
from tlt_lightning.objectives import GRPO

SHORT, LONG = 24, 200
NUM_LEARNING, NUM_ITERATIONS = 4, 12


def evenness(prompt: str, response: str, row: dict) -> float:
    return sum(word.isdigit() and int(word) % 2 == 0 for word in response.split()[:8]) / 8


class UnevenEngine(VLLMEngine):
    """Writes `SHORT` tokens on rank 0 and `LONG` on rank 1."""

    def generate(self, requests: Sequence[Request], sampling: Sampling, **rest) -> Iterator[Response]:
        limit = (SHORT, LONG)[torch.distributed.get_rank()]
        return super().generate([replace(request, max_tokens=limit) for request in requests], sampling, **rest)


class Observer(RolloutCallback):
    def __init__(self, out: Path, drafting: LongTailIdleCallback, mode: str) -> None:
        self.out, self.drafting, self.mode = out, drafting, mode
        self.own: list[dict[str, float]] = []
        self.rows: list[dict[str, float]] = []
        self.paces: dict[str, list[float]] = {"wall": [], "cpu": []}  # engine steps per second
        self.steps: list[tuple[float, float]] = []

    def on_rollout_start(self, trainer, pl_module):
        self.steps = []
        if trainer.current_epoch >= NUM_LEARNING:
            self.drafting.every_n_iterations = 2
            self.drafting.training._warmup.base_lrs = [0.0]
            self.drafting.training.optimizer.param_groups[0]["lr"] = 0.0

    def on_rollout_progress(self, trainer, pl_module, progress):
        self.steps.append((time.perf_counter(), time.process_time()))
        if self.mode == "die" and trainer.global_rank == 1 and trainer.current_epoch:
            time.sleep(0.1)

    def on_exception(self, trainer, pl_module, exception):
        (self.out / f"ended{trainer.global_rank}").write_text(str(time.time()))

    def on_rollout_end(self, trainer, pl_module, rollouts):
        for pace, first, last in zip(self.paces.values(), self.steps[0], self.steps[-1], strict=True):
            pace.append((len(self.steps) - 1) / (last - first))
        stats = trainer.datamodule.engine.stats()
        self.own.append({"version": stats["speculation/drafter_version"], "steps": self.drafting.num_steps})

    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch:
            self.rows.append({name: float(value) for name, value in trainer.callback_metrics.items()})

    def on_train_end(self, trainer, pl_module):
        self.on_train_epoch_start(trainer, pl_module)
        weights = [tensor.double().sum().item() for _, tensor in self.drafting.drafter.trainable_tensors()]
        state = {"own": self.own, "rows": self.rows, "paces": self.paces, "weights": weights}
        (self.out / f"rank{trainer.global_rank}.json").write_text(json.dumps(state))


def die(out: Path) -> None:
    (out / "ended0").write_text(str(time.time()))
    os.kill(os.getpid(), signal.SIGKILL)


def make_data(prompts: str) -> RolloutDataModule:
    speculation = Speculation(selector=fixed(), cold_head=True, max_draft_tokens=3)
    return RolloutDataModule(
        UnevenEngine(
            dtype="float32", kv_cache_gib=0.0625, max_num_seqs=16, enforce_eager=True, speculation=speculation
        ),
        train=PromptSource(path=prompts),
        rewards=[RewardTerm(function=evenness)],
        group_size=4,
        prompts_per_iteration=4,
        micro_batch_size=4,
        max_prompt_tokens=16,
        sampling=Sampling(max_tokens=LONG),
    )


def make_trainer(out: Path, max_epochs: int, *callbacks: L.Callback) -> L.Trainer:
    return L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(process_group_backend="gloo"),
        max_epochs=max_epochs,
        accumulate_grad_batches=2,
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
    trainer_of_drafters.WARMUP_STEPS = 1  # on a busy machine a window holds few steps; the first must teach already
    drafter = DrafterModule(policy, optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2))
    drafting = LongTailIdleCallback(drafter, pack_tokens=128, max_passes=1000)
    if mode == "die" and os.environ.get("LOCAL_RANK", "0") == "0":
        loss, calls = drafter.loss, iter([False])  # the first call is the step that is tried before the run
        drafter.loss = lambda batch: die(Path(out)) if next(calls, True) else loss(batch)
    trainer = make_trainer(Path(out), NUM_ITERATIONS, drafting, Observer(Path(out), drafting, mode))
    trainer.fit(make_module(policy), make_data(prompts))
