"""Run by test_two_ranks.py, once per rank: two iterations on two CPU processes, rank 1 writing longer responses."""

import itertools
import json
import os
import sys
import time
from dataclasses import fields
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import lightning as L
import torch
from lightning.pytorch.cli import LightningArgumentParser, Namespace, SaveConfigCallback
from lightning.pytorch.strategies import DDPStrategy

from tlt_lightning import PromptSource, RewardTerm, RLModule, RolloutCallback, RolloutDataModule, RunReport, Sampling
from tlt_lightning.data.iteration_settings import DynamicSampling
from tlt_lightning.engine import TransformersEngine, VLLMEngine
from tlt_lightning.objectives import GRPO, ReinforcePlusPlus
from tlt_lightning.ranks.reduce import sum_over_ranks


def evenness(prompt: str, response: str, row: dict) -> float:
    return sum(word.isdigit() and int(word) % 2 == 0 for word in response.split()) / 8


def late_signal(prompt: str, response: str, row: dict) -> float:
    """All rewards differ, but for those of rank 1's first rollout, which are equal."""
    number = next(NUMBERS)
    return 0.0 if number < 8 and torch.distributed.get_rank() == 1 else float(number)


NUMBERS = itertools.count()


class CommandLine(SaveConfigCallback):
    """What Lightning's command line adds, without writing."""

    def __init__(self) -> None:
        super().__init__(LightningArgumentParser(), Namespace())

    def setup(self, trainer, pl_module, stage): ...


class Observer(RolloutCallback):
    def __init__(self, out: Path, die: bool) -> None:
        self.out, self.die = out, die
        self.windows: list[dict] = []
        self.prompts: list[int] = []
        self.versions: list[int] = []
        self.batches: list[int] = []  # micro-batches of each optimizer step
        self.starts = 0
        self.ends: list[int] = []
        self.sums: list[tuple[float, float]] = []

    def on_rollout_start(self, trainer, pl_module):
        self.starts += 1

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        if trainer.current_epoch == 0:
            gradients = {name: parameter.grad for name, parameter in pl_module.policy.named_parameters()}
            torch.save((self.scored, gradients), self.out / f"update{trainer.global_rank}.pt")

    def on_rollout_scored(self, trainer, pl_module, batch):
        self.scored = {item.name: getattr(batch, item.name) for item in fields(batch)}
        own = torch.ones(())
        self.sums.append((float(sum_over_ranks(trainer, own)), float(own)))

    def on_rollout_progress(self, trainer, pl_module, progress):
        if trainer.global_rank == 1 and trainer.training and not progress.running:  # the straggler
            while not (self.out / f"idle{trainer.current_epoch}").exists():
                time.sleep(0.005)
            time.sleep(0.3)
            if self.die and trainer.current_epoch == 1:
                os._exit(3)

    def on_rollout_idle(self, trainer, pl_module, window):
        started = time.perf_counter()
        (self.out / f"idle{trainer.current_epoch}").touch()
        while window.is_open():
            time.sleep(0.001)
        self.windows.append({"seconds": time.perf_counter() - started, "waiting_for": window.num_waiting_for})

    def on_rollout_end(self, trainer, pl_module, rollouts):
        self.ends.append(len(rollouts))
        self.prompts += [rollout.prompt.index for rollout in rollouts[::4]]
        self.versions += [version for rollout in rollouts for version in rollout.response.policy_versions]

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.batches.append(len(batch))
        pl_module.log("rank", float(trainer.global_rank), on_step=False, on_epoch=True, sync_dist=True)

    def on_train_end(self, trainer, pl_module):
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        weights = [float(tensor.double().abs().sum()) for _, tensor in pl_module.policy_weights()]
        names = ("windows", "prompts", "versions", "batches", "starts", "ends", "sums")
        state = {name: getattr(self, name) for name in names}
        path = self.out / f"rank{trainer.global_rank}.json"
        path.write_text(json.dumps({**state, "weights": weights, "metrics": metrics}))


def main(policy: str, prompts: str, out: str, engine: str, mode: str) -> None:
    L.seed_everything(3)
    vllm = VLLMEngine(dtype="float32", kv_cache_gib=0.0625, max_num_seqs=16, enforce_eager=True)
    data = RolloutDataModule(
        engine=vllm if engine == "vllm" else TransformersEngine(batch_size=4),
        train=PromptSource(path=prompts),
        val=PromptSource(path=prompts),
        rewards=[RewardTerm(function=late_signal if mode == "dynamic" else evenness)],
        dynamic_sampling=DynamicSampling() if mode == "dynamic" else None,
        group_size=4,
        prompts_per_iteration=4,
        micro_batch_tokens=64 if os.environ.get("LOCAL_RANK", "0") == "0" else 32,  # more passes on rank 1
        max_prompt_tokens=16,
        sampling=Sampling(max_tokens=8),
    )
    objective = ReinforcePlusPlus() if mode == "whitened" else GRPO()
    module = RLModule(policy, objective, optimizer=lambda p: torch.optim.AdamW(p, lr=3e-3))
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(process_group_backend="gloo"),
        max_epochs=1 if mode == "dynamic" else 2,
        callbacks=[Observer(Path(out), die=mode == "die"), CommandLine(), RunReport(f"{out}/report")],
        logger=False,
        limit_val_batches=0,
        enable_checkpointing=False,
        enable_progress_bar=True,  # which reads metrics on rank zero alone
        enable_model_summary=False,
        default_root_dir=out,
    )
    trainer.fit(module, data)


if __name__ == "__main__":
    main(*sys.argv[1:])
