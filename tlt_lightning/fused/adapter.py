"""Compute linear layers with LoRA adapters: `y = x W^T + bias + scaling (x A^T) B^T`.

PEFT writes the adapter's output, writes it again scaled, adds it and casts the sum. Here matrix products add into their
result. For the backward pass x and `scaling x A^T` are kept, no more than PEFT's operations together keep.
"""

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from typing_extensions import override


def fuse_adapters(model: nn.Module) -> None:
    """Let each adapted linear layer of a model compute as this module does, wherever that is PEFT's own function."""
    from peft.tuners.lora import Linear

    for layer in model.modules():
        if type(layer) is Linear:
            layer.forward = MethodType(_forward, layer)  # type: ignore[method-assign]  # its class stays as it is


def _forward(layer: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    device = x.device.type
    is_autocast = torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if is_autocast else x.dtype
    if args or kwargs or not _is_plain(layer):
        return type(layer).forward(layer, x, *args, **kwargs)
    (name,) = layer.active_adapters
    base, a, b = layer.base_layer, layer.lora_A[name].weight, layer.lora_B[name].weight
    if not (is_autocast or base.weight.dtype == a.dtype == b.dtype == dtype):
        return type(layer).forward(layer, x)  # PEFT casts to and fro
    bias = None if base.bias is None else base.bias.to(dtype)
    tensors = (x.to(dtype).flatten(0, -2), base.weight.to(dtype), bias, a.to(dtype), b.to(dtype))
    # Views are made here: nobody could add to one that the function had made.
    return _AdaptedLinear.apply(*tensors, layer.scaling[name]).view(*x.shape[:-1], base.out_features)


def _is_plain(layer: Any) -> bool:
    """Return True if a layer is frozen weights with one adapter, which is nothing but `scaling * B A`."""
    if layer.disable_adapters or layer.merged or len(layer.active_adapters) != 1:
        return False
    name, base = layer.active_adapters[0], layer.base_layer
    return (
        name in layer.lora_A
        and name not in layer.lora_variant  # DoRA and its like
        and isinstance(layer.lora_dropout[name], nn.Identity)
        and layer.lora_B[name].bias is None
        and not layer.fan_in_fan_out
        and type(base) is nn.Linear
        and not any(parameter.requires_grad for parameter in base.parameters())
    )


class _AdaptedLinear(torch.autograd.Function):
    """Takes x (N, I), W (O, I), bias (O,) or None, A (r, I), B (O, r), all of one type; returns y (N, O).

    With g = dL/dy: dL/dx = g W + s (g B) A, dL/dA = s (g B)^T x, dL/dB = g^T (s x A^T).
    """

    @staticmethod
    @override
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scaling: float
    ) -> Tensor:
        inner = (x @ a.T).mul_(scaling)
        # The small product comes first: added second, it would read and write y again.
        y = inner @ b.T if bias is None else torch.addmm(bias, inner, b.T)
        y.addmm_(x, weight.T)
        ctx.save_for_backward(x, inner, weight, a, b)
        ctx.scaling = scaling
        return y

    @staticmethod
    @once_differentiable
    @override
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, inner, weight, a, b = ctx.saved_tensors
        grad_inner = (grad @ b).mul_(ctx.scaling)
        grad_x = (grad_inner @ a).addmm_(grad, weight) if ctx.needs_input_grad[0] else None
        return grad_x, None, None, grad_inner.T @ x, grad.T @ inner, None
