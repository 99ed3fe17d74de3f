"""Compute MLPs of Llama's kind whose three layers have LoRA adapters: `h = silu(gate(x)) * up(x)`, `y = down(h)`.

Layer by layer, products of the adapters are written to tensors of the width of h, and read to be added to others. Here,
on a GPU, they are computed where gate, up and the gradient of h are read anyway; of gate and up `x W^T` alone is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from typing_extensions import override

from tlt_lightning.fused import layers
from tlt_lightning.fused.adapter import weights_of


def fuse_adapted_mlps(model: nn.Module) -> None:
    """Let MLPs that `fuse_layers` has fused compute as this module does, as long as all their layers are adapted."""
    from peft.tuners.lora import Linear

    for layer in model.modules():
        if layers.is_fused_mlp(layer) and all(type(each) is Linear for each in _parts(layer)):
            layer.forward = MethodType(_forward, layer)  # its class stays as it is


def _parts(layer: Any) -> tuple[nn.Module, nn.Module, nn.Module]:
    return layer.gate_proj, layer.up_proj, layer.down_proj


def _forward(layer: Any, x: Tensor) -> Tensor:
    found = [weights_of(part, x) for part in _parts(layer)]
    whole = [each for each in found if each is not None and each[1] is None]  # without a bias
    if len(whole) < 3 or len({each[2].shape[0] for each in whole}) > 1 or not layers.is_silu(layer.act_fn):
        return layers.mlp_forward(layer, x)
    tensors = [tensor for weight, _, a, b, _ in whole for tensor in (weight, a, b)]
    scalings = [scaling for *_, scaling in whole]
    return _AdaptedMLP.apply(x.to(tensors[0].dtype), scalings, *tensors)


class _AdaptedMLP(torch.autograd.Function):
    """Takes x (..., H), three scalings, and W, A and B of gate (I, H), up (I, H) and down (H, I), all of one type.

    Adapters are of one rank. Gradients are those of `_AdaptedLinear`.
    """

    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor, scalings: Sequence[float], *weights: Tensor) -> Tensor:
        w_gate, a_gate, b_gate, w_up, a_up, b_up, w_down, a_down, b_down = weights
        s_gate, s_up, s_down = scalings
        rows = x.flatten(0, -2)
        gate_inner, up_inner = (rows @ a_gate.T).mul_(s_gate), (rows @ a_up.T).mul_(s_up)
        gate, up = rows @ w_gate.T, rows @ w_up.T
        h = _gated(gate, up, gate_inner, up_inner, b_gate, b_up)
        inner = (h @ a_down.T).mul_(s_down)
        ctx.save_for_backward(rows, gate_inner, up_inner, gate, up, h, inner, *weights)
        ctx.scalings = scalings
        return (inner @ b_down.T).addmm_(h, w_down.T).view(*x.shape[:-1], w_down.shape[0])

    @staticmethod
    @once_differentiable
    @override
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, gate_inner, up_inner, gate, up, h, inner, *weights = ctx.saved_tensors
        w_gate, a_gate, b_gate, w_up, a_up, b_up, w_down, a_down, b_down = weights
        s_gate, s_up, s_down = ctx.scalings
        grad_rows = grad.flatten(0, -2)
        grad_inner = (grad_rows @ b_down).mul_(s_down)
        of_down = (None, grad_inner.T @ h, grad_rows.T @ inner)
        tensors = (gate, up, grad_inner, gate_inner, up_inner, a_down, b_gate, b_up)
        grad_gate, grad_up = _gated_gradient(grad_rows @ w_down, *tensors)
        grad_gate_inner, grad_up_inner = (grad_gate @ b_gate).mul_(s_gate), (grad_up @ b_up).mul_(s_up)
        of_gate = (None, grad_gate_inner.T @ rows, grad_gate.T @ gate_inner)
        of_up = (None, grad_up_inner.T @ rows, grad_up.T @ up_inner)
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = torch.cat((grad_gate_inner, grad_up_inner), -1) @ torch.cat((a_gate, a_up))
            grad_x = grad_x.addmm_(grad_gate, w_gate).addmm_(grad_up, w_up).view(*grad.shape[:-1], rows.shape[-1])
        return grad_x, None, *of_gate, *of_up, *of_down


def _has_kernels(rows: Tensor, inner: Tensor) -> bool:
    if not rows.is_cuda or rows.dtype.itemsize > 2:
        return False
    from tlt_lightning.fused import kernels  # loads Triton

    return inner.shape[1] <= kernels.MAX_RANK and kernels.work()


def _gated(gate: Tensor, up: Tensor, gate_inner: Tensor, up_inner: Tensor, b_gate: Tensor, b_up: Tensor) -> Tensor:
    if _has_kernels(gate, gate_inner):
        from tlt_lightning.fused import kernels

        return kernels.gated(gate, up, gate_inner, up_inner, b_gate, b_up)
    return layers.gated(torch.addmm(gate, gate_inner, b_gate.T), torch.addmm(up, up_inner, b_up.T))


def _gated_gradient(
    grad: Tensor,
    gate: Tensor,
    up: Tensor,
    grad_inner: Tensor,
    gate_inner: Tensor,
    up_inner: Tensor,
    a_down: Tensor,
    b_gate: Tensor,
    b_up: Tensor,
) -> tuple[Tensor, Tensor]:
    if _has_kernels(gate, gate_inner):
        from tlt_lightning.fused import kernels

        return kernels.gated_gradient(grad, gate, up, grad_inner, gate_inner, up_inner, a_down, b_gate, b_up)
    sums = (torch.addmm(gate, gate_inner, b_gate.T), torch.addmm(up, up_inner, b_up.T))
    return layers.gated_gradient(grad.addmm_(grad_inner, a_down), *sums)
