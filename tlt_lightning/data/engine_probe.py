"""Check by responses that the engine writes with the policy's weights."""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import cycle, islice, zip_longest

import lightning as L
import torch
from lightning.fabric.utilities import move_data_to_device
from torch import nn

from tlt_lightning.engine.base import RolloutEngine
from tlt_lightning.engine.probe import check_same_logps
from tlt_lightning.policy import response_logps
from tlt_lightning.rollout import Prompt, Request, Rollout, Sampling, collate, split_groups

log = logging.getLogger(__name__)

NUM_RESPONSES, NUM_TOKENS = 8, 64
"""Responses that are compared, those to the shortest prompts (more, if more engines write), and tokens of each."""

NUM_ASKED, NUM_TOKENS_ASKED = 4, 16
"""Likewise of what is asked for besides; more, if more engines write."""


class EngineProbe:
    """Compares log-probs after the first sync of weights and after the first new drafter, by what is written anyway.

    An engine to which weights travel (`runs_on`) is probed after every sync. What it writes amid an update is of no
    single version, so it is asked for a few short texts besides.

    Log-probs of greedy responses, and of a part of the distribution (`Sampling.filters`), say nothing: the probe waits.
    """

    def __init__(self) -> None:
        self._last: tuple[bool, int] | None = None  # with or without a drafter, and version of the weights

    def requests(self, engine: RolloutEngine, prompts: Sequence[Prompt], sampling: Sampling) -> list[Request]:
        """Return what to ask of an engine that has taken weights amid what it writes: one for each host at least.

        Their ids are negative, as no others are while the policy learns.
        """
        if not engine.runs_on or not _tells(sampling):
            return []
        shortest = sorted(prompts, key=lambda prompt: len(prompt.ids))
        texts = islice(cycle(shortest), max(NUM_ASKED, engine.num_hosts))
        limit = min(sampling.max_tokens, NUM_TOKENS_ASKED)
        return [
            Request(id=-number, group=-number, prompt_ids=prompt.ids, max_tokens=limit)
            for number, prompt in enumerate(texts, start=1)
        ]

    def check(self, trainer: L.Trainer, engine: RolloutEngine, rollouts: Iterable[Rollout], sampling: Sampling) -> bool:
        """Raise RuntimeError unless new responses have the policy's log-probs, where they tell; True if it compared.

        Args:
            trainer: Its module's policy wrote the responses.
            engine: The engine that wrote them.
            rollouts: The responses.
            sampling: How they were sampled.
        """
        has_new_drafter = engine.drafter_version >= 0
        point = has_new_drafter, engine.policy_version if engine.runs_on else 0
        if point == self._last or not _tells(sampling):
            return False
        self._last = point
        if engine.compute_dtype == "fp8" and getattr(trainer.lightning_module.objective, "correction", None) is None:
            log.warning(
                "The engine writes in %s, and the objective corrects for nothing: leave `objective.correction` at its "
                "default, or `quantization` at null.",
                engine.compute_dtype,
            )
        policy = trainer.lightning_module.policy
        assert isinstance(policy, nn.Module)
        parts = [_beginning(rollout) for rollout in compared(rollouts, engine.num_hosts)]
        batch = collate(parts, pad_id=0, temperature=sampling.temperature)
        with torch.no_grad(), trainer.precision_plugin.forward_context():
            logps = response_logps(policy, move_data_to_device(batch, trainer.lightning_module.device))[0]
        dtype, when = _coarser(trainer, policy, engine), _when(engine, has_new_drafter=has_new_drafter)
        check_same_logps(batch.rollout_logps, logps, batch.response_mask, dtype=dtype, when=when)
        return True


def compared(rollouts: Iterable[Rollout], num_hosts: int) -> list[Rollout]:
    """Return those to the shortest prompts, a second of a group after the first of all: a host writes whole groups."""
    groups = split_groups(sorted(rollouts, key=lambda rollout: len(rollout.prompt.ids)))
    in_turn = (each for turn in zip_longest(*groups) for each in turn if each is not None)
    return list(islice(in_turn, max(NUM_RESPONSES, num_hosts)))


def _tells(sampling: Sampling) -> bool:
    return bool(sampling.temperature) and not sampling.filters


def _when(engine: RolloutEngine, *, has_new_drafter: bool) -> str:
    if engine.runs_on:
        return f"With weights of version {engine.policy_version}"
    return "After the first update of the drafter" if has_new_drafter else "After the first sync of weights"


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
