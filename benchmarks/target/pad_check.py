"""Is a widened network the small one? Log-probs of the policies and drafts of the heads, compared on the same text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.target.head import NUM_DRAFT_TOKENS, load_policy, make_packs, write_rows
from tlt_lightning.drafter.module import DrafterModule
from tlt_lightning.drafter.packing import PackedBatch
from tlt_lightning.drafter.quality import quality_of

ROWS, LENGTH = 4, 1026  # packs of 1024 entries


@torch.no_grad()
def log_probs(policy: PreTrainedModel, ids: Tensor) -> Tensor:
    """Log-probs after each token of `ids`, float32, on the CPU: (B, S, V)."""
    return torch.stack([policy(row[None].to(policy.device)).logits[0].float().log_softmax(-1).cpu() for row in ids])


def distance(reference: Tensor, other: Tensor) -> dict[str, float]:
    """Mean and largest difference of the log-probs of tokens that occur, mean KL divergence, and equal argmax.

    Args:
        reference: Log-probs. (B, S, V)
        other: Log-probs over the same tokens, and perhaps more. (B, S, V or more)
    """
    same_argmax = (reference.argmax(-1) == other.argmax(-1)).double().mean().item()
    other, probs = other[..., : reference.shape[-1]], reference.exp()
    difference = (reference - other).abs() * (probs > 1e-3)
    return {
        "mean_difference": (probs * difference).sum(-1).mean().item(),
        "largest_difference": difference.max().item(),
        "kl": (probs * (reference - other)).sum(-1).mean().item(),
        "same_argmax": same_argmax,
    }


def compare(
    small: Path, wide: Path, heads: Sequence[tuple[Path, Path]], device: str, dtype: torch.dtype
) -> dict[str, dict[str, Any]]:
    """Compare the wide policy and heads with the small ones in the same precision.

    Args:
        small: The small policy.
        wide: The wide one.
        heads: Small heads, each with its wide one.
        device: Where to compute.
        dtype: Of both policies.

    Returns:
        Under `policy` the distance of the wide one, as `floor` that of the small one from itself in float32, and the
        log of the padded tokens' probability where it is largest. By name of the head, the quality of both.
    """
    ids = write_rows(0, ROWS, LENGTH)
    exact = log_probs(load_policy(small, device, torch.float32), ids)
    policies = {path: load_policy(path, device, dtype) for path in (small, wide)}
    rounded, widened = (log_probs(policy, ids) for policy in policies.values())
    mass = widened[..., exact.shape[-1] :].logsumexp(-1).max().item()
    facts: dict[str, dict[str, Any]] = {
        "policy": {
            "wide": distance(rounded, widened),
            "floor": distance(exact, rounded),
            "largest_padded_log_mass": mass,
        }
    }
    for small_head, wide_head in heads:
        pair = {"small": (small, small_head), "wide": (wide, wide_head)}
        facts[small_head.name] = {
            name: head_quality(path, head, policies[path], ids, dtype) for name, (path, head) in pair.items()
        }
    return facts


def head_quality(path: Path, head: Path, policy: PreTrainedModel, ids: Tensor, dtype: torch.dtype) -> dict[str, float]:
    """How well the head drafts for `policy`, saved at `path`: how much is accepted, and the first draft's loss."""
    module, device = DrafterModule(str(path), str(head), num_draft_tokens=NUM_DRAFT_TOKENS), policy.device.type
    module.configure_model()
    module.to(device)
    packs: list[PackedBatch] = make_packs(policy, ids, module.layer_ids, LENGTH - 2)
    with torch.autocast(device, torch.bfloat16, enabled=dtype is torch.bfloat16):
        metrics = quality_of(torch.cat([module.measure(batch) for batch in packs]).sum(0)).metrics("")
    return {name: value for name, value in metrics.items() if "accept" in name or name == "loss_pos_1"}
