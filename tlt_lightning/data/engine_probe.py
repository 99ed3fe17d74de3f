"""Check by a run's first responses that the engine wrote with the policy's weights."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace

import lightning as L
import torch
from lightning.fabric.utilities import move_data_to_device
from torch import nn

from tlt_lightning.engine.base import RolloutEngine
from tlt_lightning.engine.probe import check_same_logps
from tlt_lightning.policy import response_logps
from tlt_lightning.rollout import Rollout, Sampling, collate

log = logging.getLogger(__name__)

NUM_RESPONSES, NUM_TOKENS = 8, 64
"""Responses that are compared, those to the shortest prompts, and tokens of each."""


class EngineProbe:
    """Compares log-probs after the first sync of weights and after the first new drafter.

    Log-probs of greedy responses, and of a part of the distribution (`Sampling.filters`), say nothing: the probe waits.
    """

    def __init__(self) -> None:
        self._done: set[bool] = set()

    def check(self, trainer: L.Trainer, engine: RolloutEngine, rollouts: Iterable[Rollout], sampling: Sampling) -> bool:
        """Raise RuntimeError unless new responses have the policy's log-probs, where they tell; True if it compared.

        Args:
            trainer: Its module's policy wrote the responses.
            engine: The engine that wrote them.
            rollouts: The responses.
            sampling: How they were sampled.
        """
        has_new_drafter = engine.drafter_version >= 0
        if has_new_drafter in self._done or not sampling.temperature or sampling.filters:
            return False
        self._done.add(has_new_drafter)
        if engine.compute_dtype == "fp8" and getattr(trainer.lightning_module.objective, "correction", None) is None:
            log.warning(
                "The engine writes in %s, and the objective corrects for nothing: leave `objective.correction` at its "
                "default, or `quantization` at null.",
                engine.compute_dtype,
            )
        policy = trainer.lightning_module.policy
        assert isinstance(policy, nn.Module)
        shortest = sorted(rollouts, key=lambda rollout: len(rollout.prompt.ids))[:NUM_RESPONSES]
        parts = [_beginning(rollout) for rollout in shortest]
        batch = collate(parts, pad_id=0, temperature=sampling.temperature)
        with torch.no_grad(), trainer.precision_plugin.forward_context():
            logps = response_logps(policy, move_data_to_device(batch, trainer.lightning_module.device))[0]
        check_same_logps(
            [part.response.logps for part in parts],
            logps,
            batch.response_mask,
            dtype=_coarser(trainer, policy, engine),
            when="After the first update of the drafter" if has_new_drafter else "After the first sync of weights",
        )
        return True


def _beginning(rollout: Rollout) -> Rollout:
    response = rollout.response
    tokens, logps = list(response.token_ids)[:NUM_TOKENS], list(response.logps)[:NUM_TOKENS]
    return replace(rollout, response=replace(response, token_ids=tokens, logps=logps))


def _coarser(trainer: L.Trainer, policy: nn.Module, engine: RolloutEngine) -> str:
    """Return the coarser of the engine's and the trainer's types; TF32 counts as bfloat16."""
    if engine.compute_dtype == "fp8":
        return engine.compute_dtype
    is_full = str(trainer.precision).startswith(("32", "64")) and torch.get_float32_matmul_precision() == "highest"
    is_full &= all(parameter.dtype.itemsize >= 4 for parameter in policy.parameters())
    return "float32" if is_full and engine.compute_dtype == "float32" else "bfloat16"
