"""Run by test_two_ranks.py, once per rank: a run that is saved before an update, or the rest of it from there.

Two iterations put prompts aside, one on each rank, and the third answers them.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import lightning as L
from lightning.pytorch.strategies import DDPStrategy

from tests.support.rl_runs import make_data, make_module, weights
from tlt_lightning import RolloutCallback, TailBatching
from tlt_lightning.engine import TransformersEngine


class Learned(TransformersEngine):
    """Learns a number on each rank, and reports the one that it went on from."""

    learned, loaded = 0, -1

    def generate(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        import torch

        self.learned += 1 + torch.distributed.get_rank()
        return super().generate(*args, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        return {"learned": self.learned}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.loaded = self.learned = state_dict["learned"]


class Save(RolloutCallback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_rollout_scored(self, trainer, pl_module, batch):
        if trainer.current_epoch == 1:
            trainer.save_checkpoint(self.path)


class History(RolloutCallback):
    """Keeps the metrics of each iteration, but for times, and the held-out prompts that this rank answered."""

    def __init__(self) -> None:
        self.rows: dict[int, dict[str, float]] = {}
        self.prompts: list[list[int]] = []
        self.held_out: list[int] = []

    def on_rollout_end(self, trainer, pl_module, rollouts):
        if trainer.validating:
            self.held_out += [rollout.prompt.index for rollout in rollouts]
        else:
            self.prompts.append([rollout.prompt.index for rollout in rollouts[::4]])

    def on_iteration_end(self, trainer, pl_module, iteration, metrics):
        clocks = (
            "time/",
            "idle/",
            "rollout/seconds",
            "rollout/tokens_per_s",
            "rollout/tail",
            "train/tokens_per_s",
            "train/mfu",
        )
        self.rows[iteration] = {name: value for name, value in metrics.items() if not name.startswith(clocks)}


def main(policy: str, prompts: str, out: str, ckpt_path: str | None = None) -> None:
    L.seed_everything(3)
    engine, module, history = Learned(), make_module(policy), History()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(process_group_backend="gloo"),
        max_epochs=3,
        callbacks=[history, *([] if ckpt_path else [Save(Path(out) / "within.ckpt")])],
        logger=False,
        check_val_every_n_epoch=3,
        num_sanity_val_steps=0,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=out,
    )
    trainer.fit(module, make_data(prompts, engine, inner_epochs=2, schedule=TailBatching(0.5)), ckpt_path=ckpt_path)
    digest = hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in weights(module).values())).hexdigest()
    rows = {iteration: row for iteration, row in history.rows.items() if iteration > 1}
    state = {
        "weights": digest,
        "loaded": engine.loaded,
        "steps": trainer.global_step,
        "rows": rows,
        "prompts": history.prompts,
        "held_out": history.held_out,
    }
    (Path(out) / f"rank{trainer.global_rank}.json").write_text(json.dumps(state))
