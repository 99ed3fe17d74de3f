"""Compute norms and gated activations of Llama's kind; most families have the very same.

In transformers a norm is a dozen passes over its input, half of them in float32, and keeps a float32 copy; a gated
activation keeps the activated gate beside the gate. Here each is one pass, and only inputs are kept.
"""

import inspect
from collections.abc import Callable
from functools import cache
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from typing_extensions import override

from tlt_lightning.fused.compiled import compiled_on_gpu


def fuse_layers(model: nn.Module) -> None:
    """Let norms and MLPs of a Hugging Face model compute as this module does, where that is their own function."""
    from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

    norm, mlp = source_code(LlamaRMSNorm.forward), source_code(LlamaMLP.forward)
    for layer in model.modules():
        forward: Callable[..., Tensor] | None = None
        source = source_code(type(layer).forward)
        if source == norm:
            forward = _norm_forward
        elif source == mlp and _is_silu(layer.act_fn):
            forward = _mlp_forward
        if forward is not None:
            layer.forward = MethodType(forward, layer)  # of this layer: classes stay as they are


def _is_silu(activation: object) -> bool:
    from transformers.activations import SiLUActivation

    return type(activation) is SiLUActivation


@cache  # a model has hundreds of layers of a few classes
def source_code(function: Callable[..., Any] | None) -> str:
    """Return a function's source; empty of one without a file, and of None."""
    try:
        return inspect.getsource(function)  # type: ignore[arg-type]
    except (OSError, TypeError):
        return ""


def _norm_forward(layer: Any, hidden_states: Tensor) -> Tensor:
    device, dtype = hidden_states.device.type, torch.promote_types(hidden_states.dtype, layer.weight.dtype)
    if torch.is_autocast_enabled(device):  # else each linear layer behind would make a copy of that type, and keep it
        dtype = torch.get_autocast_dtype(device)
    return _Norm.apply(hidden_states, layer.weight, layer.variance_epsilon, dtype)


def _mlp_forward(layer: Any, x: Tensor) -> Tensor:
    if not _is_silu(layer.act_fn):  # a callback has put another in its place
        return type(layer).forward(layer, x)
    return layer.down_proj(_Gated.apply(layer.gate_proj(x), layer.up_proj(x)))


@compiled_on_gpu
def _norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    wide = x.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (weight * (wide * scale).to(x.dtype)).to(dtype), scale


@compiled_on_gpu
def _norm_gradient(grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    unit, inner = x.float() * scale, grad.float() * weight.float()
    return ((inner - unit * (inner * unit).mean(-1, keepdim=True)) * scale).to(x.dtype)


@compiled_on_gpu
def _norm_weight_gradient(grad: Tensor, x: Tensor, scale: Tensor) -> Tensor:
    return (grad.float() * (x.float() * scale)).sum(0)


class _Norm(torch.autograd.Function):
    """Takes x (..., H), weight (H,), eps and a type; returns weight * x / sqrt(mean(x^2) + eps) of that type."""

    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        rows = x.flatten(0, -2)
        y, scale = _norm(rows, weight, eps, dtype)
        ctx.save_for_backward(rows, weight, scale)
        return y.view(x.shape)

    @staticmethod
    @once_differentiable
    @override
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, scale = ctx.saved_tensors
        grad_x, grad_weight, grad_rows = None, None, grad.flatten(0, -2)
        if ctx.needs_input_grad[0]:
            grad_x = _norm_gradient(grad_rows, rows, weight, scale).view(grad.shape)
        if ctx.needs_input_grad[1]:
            grad_weight = _norm_weight_gradient(grad_rows, rows, scale)
        return grad_x, grad_weight, None, None


@compiled_on_gpu
def _gated(gate: Tensor, up: Tensor) -> Tensor:
    return nn.functional.silu(gate) * up


@compiled_on_gpu
def _gated_gradient(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    return torch.ops.aten.silu_backward(grad * up, gate), grad * nn.functional.silu(gate)


class _Gated(torch.autograd.Function):
    """Takes gate and up (..., I) of one type; returns silu(gate) * up."""

    @staticmethod
    @override
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return _gated(gate.flatten(0, -2), up.flatten(0, -2)).view(gate.shape)

    @staticmethod
    @once_differentiable
    @override
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        rows = (each.flatten(0, -2) for each in (grad, gate, up))
        grad_gate, grad_up = _gated_gradient(*rows)
        return grad_gate.view(grad.shape), grad_up.view(grad.shape)
