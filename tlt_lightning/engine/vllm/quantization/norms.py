"""Find out by running them what a policy's norms do with their weights: some add one to them before they multiply."""

from __future__ import annotations

from copy import deepcopy
from functools import cache

import torch
from torch import nn


@cache
def norm_offset(policy: str) -> float:
    """Return the offset that the norms before and in attention add to their weights: 0, or 1.

    Args:
        policy: Path or hub name, of which the config alone is read.

    Raises:
        ValueError: The norms differ or do something else, or one in attention has no weights.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(policy))
    offsets = {
        name: _offset(module)
        for name, module in model.named_modules()
        if name.endswith("input_layernorm") or (".self_attn." in name and "norm" in name.rpartition(".")[2])
        if not isinstance(module, nn.Identity)
    }
    known = {offset for offset in offsets.values() if offset in (0, 1)}
    if unknown := [name for name, offset in offsets.items() if offset not in known]:
        raise ValueError(
            "`quantization.kv_cache` 'fp8' takes its scales from the weights of each layer, and does not know what "
            f"{', '.join(sorted({name.rpartition('.')[2] for name in unknown}))} of `policy` {policy!r} do; set 'auto'."
        )
    if len(known) > 1:
        raise ValueError(
            f"`quantization.kv_cache` 'fp8' knows norms of one kind, and `policy` {policy!r} has several; set 'auto'."
        )
    return 1.0 if 1 in known else 0.0


@torch.no_grad()
def _offset(norm: nn.Module) -> float | None:
    """Return the offset that a norm adds to its weights; None if the norm has no weights."""
    norm = deepcopy(norm).to_empty(device="cpu")  # of the meta device
    weight = dict(norm.named_parameters()).get("weight")
    if weight is None:
        return None
    given, outputs = torch.linspace(-1, 2, weight.numel()).view(1, *weight.shape), []
    for value in (0.0, 1.0):
        for parameter in norm.parameters():
            parameter.zero_()
        weight.fill_(value)
        outputs.append(norm(given))
    normed = outputs[1] - outputs[0]  # what the weights multiply
    return round(float((outputs[0] * normed).sum() / normed.square().sum()), 3)
