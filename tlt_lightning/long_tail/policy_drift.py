"""Measure how far the policy has moved, which a drafter has to follow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor

from tlt_lightning.data.batch import RolloutBatch
from tlt_lightning.hidden_states import choose_rows
from tlt_lightning.objectives.kl import k3
from tlt_lightning.policy import response_logps

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
        self._answers: list[RolloutBatch] = []
        self._logps: list[Tensor] = []

    @torch.no_grad()
    def measure(self, batch: RolloutBatch, score: Callable[[RolloutBatch], Tensor]) -> float:
        """Return the mean over tokens in nats, never negative; 0 in the first call.

        The first call takes its answers from `batch`. `score` gives log-probs of a batch's response tokens under the
        policy of now, (B, T).
        """
        if not self._answers:
            rows = choose_rows(batch.lengths.tolist(), _MAX_TOKENS, torch.Generator().manual_seed(0))
            rows = rows or [int(batch.lengths.argmin())]
            self._answers = [batch.select(rows)]  # of one pass, on every rank: `fsdp2` makes it a collective
            self._logps = [score(answer).float().cpu() for answer in self._answers]
            return 0.0
        now = [score(answer).float().cpu() for answer in self._answers]
        masks = [answer.response_mask.bool() for answer in self._answers]
        terms = [k3(before, logps)[mask] for before, logps, mask in zip(self._logps, now, masks, strict=True)]
        return torch.cat(terms).mean().item()

    def state_dict(self) -> dict[str, Any]:
        """Return the answers and their first log-probs, as tensors and primitives."""
        answers = [
            {item.name: value for item in fields(answer) if (value := getattr(answer, item.name)) is not None}
            for answer in self._answers
        ]
        return {"answers": answers, "logps": self._logps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on measuring from where the saved run began."""
        self._answers = [RolloutBatch(**values) for values in state_dict["answers"]]
        self._logps = list(state_dict["logps"])
