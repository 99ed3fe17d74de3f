"""Compare the engine's log-probs and texts with the trainer's pass over them. Pure torch."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

import torch
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor, nn

from tlt_lightning.policy import response_logps
from tlt_lightning.rollout import Prompt, Response, Rollout, RolloutBatch, collate

Written = Sequence[tuple[list[int], list[float]]]
"""Tokens and log-probs of each response."""


def as_batch(prompts: Sequence[Sequence[int]], written: Written, device: torch.device) -> RolloutBatch:
    """Return the responses as the trainer sees them."""
    rollouts = [
        Rollout(Prompt("", list(prompt)), Response(0, tokens, logps, "stop", (0,)), "", 0)
        for prompt, (tokens, logps) in zip(prompts, written, strict=True)
    ]
    return move_data_to_device(collate(rollouts, pad_id=0, temperature=1.0), device)


@torch.no_grad()
def score(
    model: nn.Module, prompts: Sequence[Sequence[int]], written: Written, micro_batch: int = 16
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the engine's and trainer's log-probs, and the trainer's entropies, (N,) each.

    The trainer's come from the package's own log-prob pass over the finished texts.
    """
    order = sorted(range(len(written)), key=lambda i: len(prompts[i]) + len(written[i][0]))
    device = next(model.parameters()).device
    parts = []
    for first in range(0, len(order), micro_batch):
        rows = order[first : first + micro_batch]
        batch = as_batch([prompts[i] for i in rows], [written[i] for i in rows], device)
        logps, entropy, *_ = response_logps(model, batch, chunk_size=2048)
        kept = batch.response_mask.bool()
        parts.append([batch.rollout_logps[kept].cpu(), logps[kept].cpu(), entropy[kept].cpu()])
    engine, trainer, entropy = (torch.cat(column).double() for column in zip(*parts, strict=True))
    return engine, trainer, entropy


def agreement(engine: Tensor, trainer: Tensor, entropy: Tensor) -> dict[str, float]:
    """Compare the engine's log-probs with the trainer's, and the texts with the policy.

    `k3` estimates KL(engine || trainer) in nats a token. `importance` is the mean of p_trainer / p_engine, 1 for an
    exact sampler. `surprise_z` is the sum over tokens of -log p - H in its own standard deviations: a martingale, so
    about N(0, 1) if every token was drawn from the policy, whatever came before it.
    """
    ratio = trainer - engine
    k3 = ratio.exp() - 1 - ratio
    surprise = -trainer - entropy
    root = sqrt(len(ratio))
    return {
        "tokens": len(ratio),
        "k3": k3.mean().item(),
        "k3_error": k3.std().item() / root,
        "mean_abs_difference": ratio.abs().mean().item(),
        "max_abs_difference": ratio.abs().max().item(),
        "importance": ratio.exp().mean().item(),
        "surprise": -trainer.mean().item(),
        "entropy": entropy.mean().item(),
        "surprise_z": (surprise.sum() / surprise.square().sum().sqrt()).item(),
    }
