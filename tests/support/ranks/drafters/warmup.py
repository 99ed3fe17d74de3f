"""Run by drafter/test_two_ranks.py, once per rank: a warm-up over texts of which ranks read unequally many."""

import json
import os
import random
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import lightning as L
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import nn

from tests.support.rl_runs import make_trainer
from tlt_lightning import DrafterDataModule, DrafterModule
from tlt_lightning.training.fsdp2 import FSDP2Strategy

LENGTHS = [700, 20, 31, 44, 9, 600, 25, 60, 12, 18, 90, 500, 33, 41]


class Observer(L.Callback):
    """Counts the tokens that a rank's target reads."""

    num_tokens = 0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        trainer.datamodule.target.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, module: nn.Module, args: object, kwargs: dict[str, torch.Tensor]) -> None:
        self.num_tokens += int((kwargs["input_ids"] > 0).sum())


def write_texts(path: Path) -> str:
    draw = random.Random(0)
    rows = [
        {"prompt_ids": [2 + number] * 3, "response_ids": [draw.randrange(2, 32) for _ in range(length)]}
        for number, length in enumerate(LENGTHS)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def main(policy: str, completions: str, out: str, strategy: str) -> None:
    observer = Observer()
    over_ranks = DDPStrategy(process_group_backend="gloo") if strategy == "ddp" else FSDP2Strategy()
    validated = {"num_sanity_val_steps": 1, "limit_val_batches": 1.0}
    trainer = make_trainer(Path(out), observer, devices=2, strategy=over_ranks, **validated)
    module = DrafterModule(policy)
    data = DrafterDataModule(completions, num_tokens=128, val_share=0.2)
    trainer.fit(module, data)
    state = {
        "weights": dict(module.trainable_tensors()),
        "metrics": dict(trainer.callback_metrics),
        "tokens": observer.num_tokens,
    }
    torch.save(state, Path(out) / f"{trainer.global_rank}.pt")
