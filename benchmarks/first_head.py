"""The head a run began with and the one that is trained along, on the same text of the same policy.

Two runs, one with a frozen head and one with an adaptive, are not alike for long: their policies part. Here one policy
drifts, and both heads draft what it wrote last.
"""

from __future__ import annotations

import lightning as L
import torch
from end_to_end_work import FIRST_HEAD
from torch import Tensor
from typing_extensions import override

from tlt_lightning.drafter.module import POLICY_ROWS
from tlt_lightning.drafter.packing import fill_packs, plan_packs
from tlt_lightning.long_tail import LongTailIdleCallback


class FirstHead(L.Callback):
    """Measures the head as it was at the start on each held-out text that the trained one is judged by.

    Args:
        drafting: What trains the head; must come before this among the Trainer's callbacks.
    """

    def __init__(self, drafting: LongTailIdleCallback) -> None:
        self._drafting = drafting
        self._first: dict[str, Tensor] = {}
        self._found: dict[str, float] = {}

    @override
    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._first = self._weights()

    def _weights(self) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in self._drafting.drafter.trainable_tensors()}

    def on_rollout_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Measure; the drafter knows the policy of now, and its decision is taken."""
        drafter, held_out = self._drafting.drafter, self._drafting.buffer.held_out
        if not held_out:
            return
        now, tokens = self._weights(), self._drafting.pack_tokens
        plans = plan_packs([len(sequence) for sequence in held_out], tokens)
        device = pl_module.device
        drafter.load_trainable({**self._first, **{name: now[name] for name in now if name == POLICY_ROWS}})
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            quality = drafter.evaluate(list(fill_packs(held_out, plans, tokens, device)))
        drafter.load_trainable(now)
        self._found = quality.metrics(FIRST_HEAD)
        trainer.datamodule.clock.lap("drafter")  # type: ignore[attr-defined]

    @override
    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        pl_module.log_dict(self._found)
