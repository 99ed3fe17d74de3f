"""Triton kernels of gated activations whose operands are sums with products of low rank: `silu(G + X B^T) * (U + ...)`.

A product of low rank is little work, and a matrix product that adds it reads and writes its large operand for it. These
kernels compute it where that operand is read anyway.
"""

from __future__ import annotations

import logging
from functools import cache
from subprocess import SubprocessError
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.errors import TritonError

log = logging.getLogger(__name__)

MAX_RANK = 128
"""Blocks of factors of this rank fit a multiprocessor's shared memory."""


@cache
def work() -> bool:
    """Tell whether the kernels can be compiled, by trying them on a few zeros; a warning says if not."""
    rows, factors = torch.zeros(2, 16, 16, dtype=torch.bfloat16, device="cuda")
    try:
        gated(rows, rows, rows, rows, factors, factors)
        gated_gradient(rows, rows, rows, rows, rows, rows, factors, factors, factors)
    except (RuntimeError, OSError, SubprocessError, TritonError) as error:
        log.warning("Triton kernels could not be compiled, and adapted MLPs take longer: %s", error)
        return False
    return True


def gated(gate: Tensor, up: Tensor, gate_inner: Tensor, up_inner: Tensor, b_gate: Tensor, b_up: Tensor) -> Tensor:
    """Return silu(gate + gate_inner B_gate^T) * (up + up_inner B_up^T), (N, I).

    Inner tensors are (N, r), each B is (I, r); all of one type, contiguous.
    """
    result = torch.empty_like(gate)
    _gated[_grid(gate)](gate, up, gate_inner, up_inner, b_gate, b_up, result, *gate.shape, **_options(gate_inner))
    return result


def gated_gradient(
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
    """Return the gradients of both sums in `gated`, whose result has the gradient grad + grad_inner A_down.

    A is (r, I).
    """
    grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
    tensors = (grad, gate, up, grad_inner, gate_inner, up_inner, a_down, b_gate, b_up, grad_gate, grad_up)
    _gated_gradient[_grid(gate)](*tensors, *gate.shape, **_options(grad_inner))
    return grad_gate, grad_up


_ROWS, _COLUMNS = 64, 64  # of a block; with 8 warps, several blocks share a multiprocessor


def _grid(like: Tensor) -> tuple[int, int]:
    return triton.cdiv(like.shape[1], _COLUMNS), triton.cdiv(like.shape[0], _ROWS)  # a row's blocks are neighbours


def _options(inner: Tensor) -> dict[str, Any]:
    rank = inner.shape[1]
    # A product in a kernel wants a power of two from 16 on.
    sizes = {"RANK": rank, "SIZE": max(16, triton.next_power_of_2(rank)), "ROWS": _ROWS, "COLUMNS": _COLUMNS}
    return {**sizes, "num_warps": 8}


@triton.jit
def _low_rank(  # type: ignore[no-untyped-def]
    inner, factor, rows, columns, num_rows, width, column_stride, rank_stride, RANK: tl.constexpr, SIZE: tl.constexpr
):
    """Return a block of inner (N, RANK) times factor (RANK, width), which lies with the given strides."""
    ranks = tl.arange(0, SIZE)
    inside = (rows < num_rows)[:, None] & (ranks < RANK)[None, :]
    left = tl.load(inner + rows[:, None] * RANK + ranks[None, :], mask=inside, other=0.0)
    inside = (ranks < RANK)[:, None] & (columns < width)[None, :]
    places = columns[None, :] * column_stride + ranks[:, None] * rank_stride
    return tl.dot(left, tl.load(factor + places, mask=inside, other=0.0), input_precision="ieee")


@triton.jit
def _gated(  # type: ignore[no-untyped-def]
    gate, up, gate_inner, up_inner, b_gate, b_up, result, num_rows, width,
    RANK: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    rows = (tl.program_id(1) * ROWS + tl.arange(0, ROWS)).to(tl.int64)  # times width, they outgrow 32 bits
    inside = (rows < num_rows)[:, None] & (columns < width)[None, :]
    places = rows[:, None] * width + columns[None, :]
    g = tl.load(gate + places, mask=inside, other=0.0).to(tl.float32)
    g += _low_rank(gate_inner, b_gate, rows, columns, num_rows, width, RANK, 1, RANK, SIZE)
    u = tl.load(up + places, mask=inside, other=0.0).to(tl.float32)
    u += _low_rank(up_inner, b_up, rows, columns, num_rows, width, RANK, 1, RANK, SIZE)
    tl.store(result + places, (g * tl.sigmoid(g) * u).to(result.dtype.element_ty), mask=inside)


@triton.jit
def _gated_gradient(  # type: ignore[no-untyped-def]
    grad, gate, up, grad_inner, gate_inner, up_inner, a_down, b_gate, b_up, grad_gate, grad_up, num_rows, width,
    RANK: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    rows = (tl.program_id(1) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    inside = (rows < num_rows)[:, None] & (columns < width)[None, :]
    places = rows[:, None] * width + columns[None, :]
    h = tl.load(grad + places, mask=inside, other=0.0).to(tl.float32)
    h += _low_rank(grad_inner, a_down, rows, columns, num_rows, width, 1, width, RANK, SIZE)
    g = tl.load(gate + places, mask=inside, other=0.0).to(tl.float32)
    g += _low_rank(gate_inner, b_gate, rows, columns, num_rows, width, RANK, 1, RANK, SIZE)
    share = tl.sigmoid(g)
    tl.store(grad_up + places, (h * g * share).to(grad_up.dtype.element_ty), mask=inside)
    u = tl.load(up + places, mask=inside, other=0.0).to(tl.float32)
    u += _low_rank(up_inner, b_up, rows, columns, num_rows, width, RANK, 1, RANK, SIZE)
    slope = share * (1 + g * (1 - share))
    tl.store(grad_gate + places, (h * u * slope).to(grad_gate.dtype.element_ty), mask=inside)
