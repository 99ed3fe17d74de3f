"""Compare the head that a run began with and the trained one on the policy's same text.

Two runs, one with a frozen head and one with an adaptive, are not alike for long: their policies part. Here one policy
drifts, and both heads draft what it wrote last.
"""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import Tensor
from typing_extensions import override

from benchmarks.end_to_end.work import FIRST_HEAD
from tlt_lightning.drafter.module import POLICY_ROWS
from tlt_lightning.drafter.packing import packs_of
from tlt_lightning.drafter.quality import quality_of
from tlt_lightning.long_tail.callback import LongTailIdleCallback


class FirstHead(L.Callback):
    """Measures the first head on each held-out text that the trained one is judged by.

    Args:
        drafting: What trains the head; must come before this among the Trainer's callbacks.
    """

    def __init__(self, drafting: LongTailIdleCallback) -> None:
        self._drafting = drafting
        self._first: dict[str, Tensor] = {}

    @override
    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # Rows of the policy's head follow the policy: they are no part of what the drafter was.
        self._first = {name: tensor for name, tensor in self._weights().items() if name != POLICY_ROWS}

    def _weights(self) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in self._drafting.drafter.trainable_tensors()}

    def on_rollout_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Measure; the drafter knows the policy of now, and its decision is taken."""
        drafter, held_out = self._drafting.drafter, self._drafting.buffer.held_out
        if not held_out:
            return
        now, device = self._weights(), pl_module.device
        drafter.load_trainable(now | self._first)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            packs = packs_of(held_out, self._drafting.pack_tokens, device)
            quality = quality_of(torch.cat([drafter.measure(batch) for batch in packs]).sum(0))
        drafter.load_trainable(now)
        pl_module.iteration_log.update(quality.metrics(FIRST_HEAD))
        pl_module.iteration_log.lap("drafter")
