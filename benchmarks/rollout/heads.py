"""Weights of EAGLE-3 heads, to put into a live engine: trained ones, and random ones of the same shape."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from tlt_lightning.engine.vllm.drafter_weights import canonical_name


def head_tensors(directory: str) -> dict[str, torch.Tensor]:
    """The trainable tensors of the head in a directory, under the names of `speculators`."""
    tensors = {}
    for file in sorted(Path(directory).glob("*.safetensors")):
        tensors |= {canonical_name(name): tensor for name, tensor in load_file(file).items()}
    return {name: value for name, value in tensors.items() if "embed_tokens" not in name and name not in ("d2t", "t2d")}


def redrawn(tensors: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    """The same shapes and scales, drawn at random: what a drafter is before it has been trained; norms stay."""
    generator = torch.Generator().manual_seed(seed)
    drawn = {}
    for name, value in tensors.items():
        if value.dim() >= 2:
            noise = torch.randn(value.shape, generator=generator)
            value = (noise * value.float().std()).to(value.dtype)
        drawn[name] = value
    return drawn
