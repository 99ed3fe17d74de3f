"""Measure how far the policy has moved, which a drafter has to follow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor

from tlt_lightning.hidden_states import choose_rows
from tlt_lightning.objectives.kl import k3
from tlt_lightning.policy import response_logps
from tlt_lightning.rollout import RolloutBatch

_MAX_TOKENS = 2048  # scored anew in each iteration; a thousandth of an iteration of a run worth speeding up


def policy_logps(trainer: L.Trainer, module: Any, batch: RolloutBatch) -> Tensor:
    """Return log-probs of the response tokens under the policy of the `RLModule`, (B, T)."""
    part = move_data_to_device(batch, module.device)
    with trainer.precision_plugin.forward_context():
        return response_logps(module.policy, part)[0]


class PolicyDrift:
    """Measures the KL divergence of the policy from what it was in the first iteration.

    Nothing else in a run without a reference model says how far the policy has moved.
    """

    def __init__(self) -> None:
        self._answers: RolloutBatch | None = None
        self._logps: Tensor | None = None  # of the first call

    @torch.no_grad()
    def measure(self, batch: RolloutBatch, score: Callable[[RolloutBatch], Tensor]) -> float:
        """Return the mean over tokens in nats, never negative; 0 in the first call.

        The first call takes its answers from `batch`. `score` gives log-probs of a batch's response tokens under the
        policy of now, (B, T).
        """
        if self._answers is None or self._logps is None:
            rows = choose_rows(batch.lengths.tolist(), _MAX_TOKENS, torch.Generator().manual_seed(0))
            rows = rows or [int(batch.lengths.argmin())]
            self._answers = batch.select(rows)  # of one pass, on every rank: `fsdp2` makes it a collective
            self._logps = score(self._answers).float().cpu()
            return 0.0
        terms = k3(self._logps, score(self._answers).float().cpu())
        return terms[self._answers.response_mask.bool()].mean().item()

    def state_dict(self) -> dict[str, Any]:
        """Return the answers and their first log-probs, as tensors and primitives; nothing before the first call."""
        if self._answers is None:
            return {}
        answers = {item.name: getattr(self._answers, item.name) for item in fields(self._answers)}
        return {"answers": answers, "logps": self._logps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on measuring from where the saved run began."""
        if state_dict:
            self._answers, self._logps = RolloutBatch(**state_dict["answers"]), state_dict["logps"]
