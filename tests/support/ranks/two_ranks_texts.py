"""Run by test_supervised_ranks.py, once per rank: a run on given texts, a head along, under a strategy."""

import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import lightning as L
import torch

from tests.support.rl_runs import make_module, make_trainer, weights
from tlt_lightning import DrafterModule, SupervisedDataModule, SupervisedDrafterCallback
from tlt_lightning.objectives import SFT

ROWS = [{"prompt": f"{i % 9} + {i % 7} =", "answer": f"{i % 5} {'8 ' * (i % 4)}"} for i in range(21)]


class Freeze(L.Callback):
    """Freezes a norm as the settings of the Trainer say."""

    def setup(self, trainer, pl_module, stage):
        pl_module.configure_model()
        pl_module.policy.base_model.norm.requires_grad_(False)


def main(policy: str, out: str, strategy: str, ckpt_path: str = "") -> None:
    L.seed_everything(3)
    module = make_module(policy, objective=SFT())
    tokens = 64 if os.environ.get("LOCAL_RANK", "0") == "0" else 16  # more passes on rank 1
    data = SupervisedDataModule(ROWS, ROWS[:7], batch_size=4, steps_per_epoch=3, micro_batch_tokens=tokens)
    checkpoints = {"enable_checkpointing": True, "limit_val_batches": 1.0, "gradient_clip_val": 0.5}
    ranks = {"strategy": strategy, "devices": 1 if strategy == "auto" else 2}
    along = SupervisedDrafterCallback(DrafterModule(policy), pack_tokens=128, buffer_gib=0.01)
    trainer = make_trainer(Path(out), Freeze(), along, max_epochs=3 if ckpt_path else 2, **checkpoints, **ranks)
    trainer.fit(module, data, ckpt_path=ckpt_path or None)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    named = {
        **weights(module),
        **{f"head.{name}": tensor.clone() for name, tensor in along.training.weights().items()},
        **{name: torch.tensor(metrics[name]) for name in ("train/loss", "train/tokens", "val/loss")},
    }
    torch.save(named, Path(out) / f"weights{trainer.global_rank}.pt")
