"""Compute rotary position embeddings of Llama's kind; most families have the very same.

In transformers a dozen operations each write a tensor of the queries' size, and as many in the backward pass. Here a
pass reads queries and keys and writes them once.
"""

from __future__ import annotations

import inspect
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from typing_extensions import override

from tlt_lightning.fused.compiled import compiled_on_gpu
from tlt_lightning.fused.layers import source_code

NAME = "apply_rotary_pos_emb"
"""Name by which attention layers of transformers call their file's function."""


def fuse_rotary(model: nn.Module) -> None:
    """Let attention layers of a Hugging Face model embed positions as this module does, where they do as Llama's."""
    for layer in model.modules():
        forward: Any = type(layer).forward
        if NAME in source_code(forward) and _is_llamas(forward.__globals__.get(NAME)):
            # The function is a global of the layer's file: this layer's code gets globals of its own.
            places = {**forward.__globals__, NAME: rotate}
            copy = FunctionType(forward.__code__, places, forward.__name__, forward.__defaults__, forward.__closure__)
            copy.__kwdefaults__ = forward.__kwdefaults__
            layer.forward = MethodType(copy, layer)


def _is_llamas(function: Any) -> bool:
    """Return True if a function is Llama's, and so is the one that it calls: NanoChat's turns the other way."""
    from transformers.models.llama import modeling_llama as llama

    half = getattr(inspect.unwrap(function), "__globals__", {}).get("rotate_half") if callable(function) else None
    theirs = llama.apply_rotary_pos_emb, llama.rotate_half
    return [source_code(each) for each in (function, half)] == [source_code(each) for each in theirs]


def rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Return queries and keys turned by the angles of their positions, under autocast of its type.

    Args:
        query: (B, heads, S, D)
        key: (B, groups, S, D)
        cos: Of each angle. (B or 1, S, D)
        sin: The same.
    """
    device, dtype = query.device.type, torch.promote_types(query.dtype, cos.dtype)
    if torch.is_autocast_enabled(device):  # attention would make a copy of that type
        dtype = torch.get_autocast_dtype(device)
    return _Rotated.apply(query, key, cos, sin, dtype)


@compiled_on_gpu
def _rotated(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, query_dtype: torch.dtype, key_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Turn rows of queries (N, heads, D) and keys (N, groups, D): the first half of D with the second."""
    (cos, other_cos), (sin, other_sin) = (each[:, None].chunk(2, -1) for each in (cos, sin))
    results = []
    for x, dtype in ((query, query_dtype), (key, key_dtype)):
        first, second = x.chunk(2, -1)
        turned = (first * cos - second * sin, second * other_cos + first * other_sin)
        results.append(torch.cat(turned, -1).to(dtype))
    return results[0], results[1]


def _rows(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(0, 1)  # (B * S, heads, D)


class _Rotated(torch.autograd.Function):
    """Takes what `rotate` does, and the type of its results."""

    @staticmethod
    @override
    def forward(
        ctx: Any, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        ctx.dtypes = query.dtype, key.dtype
        return _turn(query, key, cos, sin, dtype, dtype)

    @staticmethod
    @once_differentiable
    @override
    def backward(ctx: Any, grad_query: Tensor, grad_key: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        back = -sin.roll(sin.shape[-1] // 2, -1)  # the transposed of a turn is a turn, too
        return *_turn(grad_query, grad_key, cos, back, *ctx.dtypes), None, None, None


def _turn(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *dtypes: torch.dtype) -> tuple[Tensor, Tensor]:
    batch, _, length, _ = query.shape
    angles = (each.expand(batch, -1, -1).flatten(0, 1) for each in (cos, sin))
    turned = _rotated(_rows(query), _rows(key), *angles, *dtypes)
    query, key = (each.unflatten(0, (batch, length)).transpose(1, 2) for each in turned)
    return query, key
