"""Run by long_tail/test_two_ranks.py, once per rank: a run with checkpoints, or the rest of it from one of them.

Each rank trains its drafter for a number of micro-steps of its own, where idle windows would depend on the clock.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils._pytree import tree_leaves

from tests.support.ranks.drafters.beside import make_data, make_module, make_trainer
from tlt_lightning import RolloutCallback
from tlt_lightning.drafter.module import DrafterModule
from tlt_lightning.long_tail.budget import FixedBudget
from tlt_lightning.long_tail.callback import LongTailIdleCallback
from tlt_lightning.ranks.idle_windows import IdleWindow

NUM_SAVED, NUM_ITERATIONS = 2, 3


class CountedWindows(LongTailIdleCallback):
    def on_rollout_idle(self, trainer, pl_module, window):
        """Train in `on_rollout_end` instead, which all ranks have."""

    def on_rollout_end(self, trainer, pl_module, rollouts):
        left = iter(range(3 + 4 * trainer.global_rank))
        super().on_rollout_idle(trainer, pl_module, IdleWindow(lambda: next(left, None) is not None, 1))


class Observer(RolloutCallback):
    """Notes what a rank's drafter and policy are where the run is resumed, where it could be again, and at the end."""

    def __init__(self, drafting: LongTailIdleCallback) -> None:
        self.drafting = drafting
        self.seen: dict[str, dict[str, str]] = {}

    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch == NUM_SAVED:
            self._note("saved", pl_module)

    def on_train_epoch_end(self, trainer, pl_module):
        if trainer.current_epoch == NUM_ITERATIONS - 1:
            self._note("trained", pl_module)

    def on_train_end(self, trainer, pl_module):
        self._note("end", pl_module)

    def _note(self, name: str, pl_module: Any) -> None:
        drafting = self.drafting
        saved = drafting.state_dict()
        state = {**saved["trainer"], **saved["publisher"]}
        state["vocabulary"] = saved["vocabulary"]
        state["policy"] = dict(pl_module.policy_weights())
        self.seen[name] = {part: digest(value) for part, value in state.items()}


def digest(state: Any) -> str:
    result = hashlib.sha256()
    for leaf in tree_leaves(state):
        if isinstance(leaf, Tensor):
            result.update(leaf.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        else:
            result.update(repr(leaf).encode())
    return result.hexdigest()[:8]


def main(policy: str, prompts: str, out: str, ckpt_path: str | None = None) -> None:
    L.seed_everything(3)
    drafter = DrafterModule(policy, draft_vocab_size=16, optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2))
    drafting = CountedWindows(drafter, pack_tokens=128, max_passes=1000, budget=FixedBudget(0.5))
    observer, checkpoints = Observer(drafting), ModelCheckpoint(out, "{epoch}", save_top_k=-1)
    trainer = make_trainer(Path(out), NUM_ITERATIONS, drafting, observer, checkpoints)
    trainer.fit(make_module(policy), make_data(prompts), ckpt_path=ckpt_path)
    trainer.save_checkpoint(Path(out) / "after.ckpt")  # the engine is closed, the process group must still be there
    (Path(out) / f"rank{trainer.global_rank}.json").write_text(json.dumps(observer.seen))
