"""Run by schedules/test_two_ranks.py, once per rank: a run that puts prompts aside, or its rest on other ranks."""

import json
import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy

from tests.support.rl_runs import make_data, make_engine, make_module
from tlt_lightning import AsyncRollout, PartialRollout, RolloutCallback, Sampling, TailBatching

SCHEDULES = {
    "tail": lambda: TailBatching(0.25),
    "partial": lambda: PartialRollout(0.25, 1),
    "async": lambda: AsyncRollout(1),
}


class Observer(RolloutCallback):
    """Notes prompts that are learned from and that wait, by iteration, and metrics."""

    def __init__(self) -> None:
        self.learned: list[list[int]] = []
        self.deferred: list[list[int]] = []
        self.rows: list[dict[str, float]] = []

    def on_rollout_end(self, trainer, pl_module, rollouts):
        self.learned.append([rollout.prompt.index for rollout in rollouts])
        self.deferred.append([group.prompt for group in trainer.datamodule.backlog.deferred])

    def on_iteration_end(self, trainer, pl_module, iteration, metrics):
        self.rows.append({name: value for name, value in metrics.items() if name.startswith("schedule/")})


def main(policy: str, prompts: str, out: str, schedule: str, num_ranks: str, ckpt_path: str | None = None) -> None:
    L.seed_everything(3)
    observer = Observer()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=int(num_ranks),
        strategy=DDPStrategy(process_group_backend="gloo") if num_ranks == "2" else "auto",
        max_epochs=4 if ckpt_path else 1,
        callbacks=[observer, ModelCheckpoint(out, "end", save_on_train_epoch_end=True)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=out,
    )
    settings = {"sampling": Sampling(max_tokens=24), "micro_batch_tokens": 128} if schedule != "tail" else {}
    engine = make_engine("transformers" if schedule == "tail" else "vllm")
    engine.sleeps = schedule != "async"
    data = make_data(prompts, engine, val=None, group_size=2, schedule=SCHEDULES[schedule](), **settings)
    trainer.fit(make_module(policy), data, ckpt_path=ckpt_path)
    state = {name: getattr(observer, name) for name in ("learned", "deferred", "rows")}
    (Path(out) / f"rank{trainer.global_rank}.json").write_text(json.dumps(state))
