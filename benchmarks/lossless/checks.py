"""Whether texts come from the policy: where greedy texts part, how log-probs agree with the trainer's. Pure torch."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import zip_longest
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn

from tlt_lightning.data.batch import RolloutBatch
from tlt_lightning.policy import causal_lm, response_logps

Written = Sequence[tuple[list[int], list[float]]]
"""Tokens and log-probs of each response."""


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Index of the first token in which two texts differ, an end against more text included; None if they are equal."""
    pairs = enumerate(zip_longest(one, other))
    return next((index for index, (a, b) in pairs if a != b), None)


def divergence(reference: Written, other: Written) -> dict[str, Any]:
    """How often, how early and how densely two sets of greedy texts part.

    A text that has parted says nothing more, so the rate counts tokens up to there.
    """
    places = [first_difference(a, b) for (a, _), (b, _) in zip(reference, other, strict=True)]
    parted = [place for place in places if place is not None]
    compared = sum(len(a) if place is None else place + 1 for (a, _), place in zip(reference, places, strict=True))
    return {
        "texts": len(places),
        "parted": len(parted),
        "share": len(parted) / len(places),
        "first": min(parted, default=None),
        "median": statistics.median(parted) if parted else None,
        "per_1000_tokens": 1000 * len(parted) / max(compared, 1),
        "compared_tokens": compared,
        "places": places,
    }


def excess(found: dict[str, Any], floor: dict[str, Any]) -> float:
    """Standard deviations by which a divergence rate lies above the floor's, both taken as Poisson counts."""
    n, m = found["parted"], floor["parted"]
    rate = (n + m) / (found["compared_tokens"] + floor["compared_tokens"])
    variance = rate * (1 / found["compared_tokens"] + 1 / floor["compared_tokens"])
    difference = n / found["compared_tokens"] - m / floor["compared_tokens"]
    return difference / sqrt(variance) if variance else 0.0


@torch.no_grad()
def gaps(model: nn.Module, prompts: Sequence[Sequence[int]], reference: Written, other: Written) -> list[float]:
    """Nats between the two tokens at each place where greedy texts part: tiny where rounding broke a tie."""
    found = []
    device = next(model.parameters()).device
    for prompt, (a, _), (b, _) in zip(prompts, reference, other, strict=True):
        place = first_difference(a, b)
        if place is None or place >= min(len(a), len(b)):
            continue
        ids = torch.tensor([[*prompt, *a[:place]]], device=device)
        lm = causal_lm(model)
        state = lm.base_model(input_ids=ids, use_cache=False).last_hidden_state[:, -1]
        logps = lm.get_output_embeddings()(state).float().log_softmax(-1)[0]
        found.append(abs(float(logps[a[place]] - logps[b[place]])))
    return found


def as_batch(prompts: Sequence[Sequence[int]], written: Written, device: torch.device) -> RolloutBatch:
    """Responses as the trainer sees them."""
    texts = [[*prompt, *tokens] for prompt, (tokens, _) in zip(prompts, written, strict=True)]
    columns, longest = max(map(len, texts)), max(len(tokens) for tokens, _ in written)
    ids = torch.zeros(len(texts), columns, dtype=torch.long)
    mask, logps = torch.zeros(2, len(texts), longest)
    for row, (text, (tokens, engine)) in enumerate(zip(texts, written, strict=True)):
        ids[row, : len(text)] = torch.tensor(text)
        mask[row, : len(tokens)] = 1
        logps[row, : len(tokens)] = torch.tensor(engine)
    nothing = torch.zeros(len(texts), dtype=torch.long)
    return RolloutBatch(
        input_ids=ids.to(device),
        prompt_lengths=torch.tensor([len(prompt) for prompt in prompts], device=device),
        response_mask=mask.to(device),
        rollout_logps=logps.to(device),
        rewards=nothing.float(),
        groups=nothing,
        policy_versions=nothing,
        truncated=nothing.bool(),
    )


@torch.no_grad()
def score(
    model: nn.Module, prompts: Sequence[Sequence[int]], written: Written, micro_batch: int = 16
) -> tuple[Tensor, Tensor, Tensor]:
    """The engine's log-probs, the trainer's, and the trainer's entropies, of all response tokens, (N,) each.

    The trainer's come from the package's own log-prob pass over the finished texts.
    """
    order = sorted(range(len(written)), key=lambda i: len(prompts[i]) + len(written[i][0]))
    device = next(model.parameters()).device
    parts = []
    for first in range(0, len(order), micro_batch):
        rows = order[first : first + micro_batch]
        batch = as_batch([prompts[i] for i in rows], [written[i] for i in rows], device)
        logps, entropy, _, _ = response_logps(model, batch, chunk_size=2048)
        kept = batch.response_mask.bool()
        parts.append([batch.rollout_logps[kept].cpu(), logps[kept].cpu(), entropy[kept].cpu()])
    engine, trainer, entropy = (torch.cat(column).double() for column in zip(*parts, strict=True))
    return engine, trainer, entropy


def agreement(engine: Tensor, trainer: Tensor, entropy: Tensor) -> dict[str, float]:
    """How far the engine's log-probs are from the trainer's, and whether the texts are what they claim to be.

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
