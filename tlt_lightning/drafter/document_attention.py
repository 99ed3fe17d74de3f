"""Attend within the documents of a pack, in linear memory, through torch's flash attention and no mask.

In step `s` of a training-time test an entry attends to its document's first-step entries up to itself, to the context
of a document that is a later piece of a sequence, and to its own entries of steps 2 to `s`. Each of the three has an
output `o_p` and a log-sum-exp of scores `l_p`, and the whole is (as in ring attention, arXiv 2310.01889)

    l = log sum_p exp(l_p),    o = sum_p exp(l_p - l) o_p.

The gradient of a part needs no `o_p`: with the probabilities `exp(scores - l)` and `rowsum(do * o)`, which the backward
kernels make of `l` and `o`, each part's share of the whole gradient comes out.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

_aten = torch.ops.aten
_EFFICIENT_ROWS = 32  # to a multiple of which torch's memory-efficient kernel pads its log-sum-exp


class Documents(NamedTuple):
    """Says who attends to whom in a pack: entries of each document, and keys and values before it, if any."""

    lengths: Sequence[int]
    contexts: Sequence[tuple[Tensor, Tensor] | None]


def attend_in_documents(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Documents | None, **options: Any
) -> tuple[Tensor, None]:
    """Attend within documents; `transformers` calls this for heads.

    Args:
        module: The attention layer.
        query: Queries of the current step. (1, heads, T, D)
        key: Keys of all steps so far, one behind the other. (1, key heads, steps * T, D)
        value: Values likewise.
        attention_mask: The documents of the pack, which need not fill it; None attends to nothing.
        options: `scaling`, and others that heads do not use.
    """
    if attention_mask is None:
        return torch.zeros_like(query).transpose(1, 2), None
    if torch.is_autocast_enabled(query.device.type):  # rotary embeddings leave float32 behind
        query, key, value = (x.to(torch.get_autocast_dtype(query.device.type)) for x in (query, key, value))
    groups, rows, used = query.shape[1] // key.shape[1], query.shape[2], sum(attention_mask.lengths)
    keys, values = (
        x[0].repeat_interleave(groups, 0).unflatten(1, (-1, rows))[:, :, :used].contiguous() for x in (key, value)
    )
    result = _StepAttention.apply(query[0, :, :used].contiguous(), keys, values, attention_mask, options["scaling"])
    return F.pad(cast("Tensor", result), (0, 0, 0, rows - used)).transpose(0, 1)[None], None


class _StepAttention(torch.autograd.Function):
    """Attention of one step: queries (heads, T, D), keys and values of all steps so far (heads, steps, T, D)."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, documents: Documents, scale: float) -> Tensor:
        lengths = documents.lengths
        out, lse = _attend(q, k[:, 0], v[:, 0], lengths, lengths, True, scale)
        outs, lses = [out], [lse]
        seen = _Seen.of(documents, q, k.shape[0])
        if seen is not None:
            its, its_lse = _attend(q[:, seen.rows], seen.keys, seen.values, *seen.lengths, False, scale)
            outs.append(torch.zeros_like(out).index_copy(1, seen.rows, its))
            lses.append(torch.full_like(lse, -torch.inf).index_copy(1, seen.rows, its_lse))
        for step in range(1, k.shape[1]):
            outs.append(v[:, step])
            lses.append(_score(q, k[:, step], scale))
        if len(outs) > 1:
            lse = torch.stack(lses).logsumexp(0)
            whole = sum(torch.exp(part - lse)[..., None] * its.float() for its, part in zip(outs, lses, strict=True))
            out = cast("Tensor", whole).to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.lengths, ctx.seen, ctx.scale = lengths, seen, scale
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        seen: _Seen | None = ctx.seen
        grad, scale = gradients[0].contiguous(), ctx.scale
        rest = (ctx.lengths, ctx.lengths, True, scale)
        dq, dk, dv = _attend_backward(grad, q, k[:, 0], v[:, 0], out, lse, *rest)
        dq, dks, dvs = dq.float(), [dk], [dv]
        if seen is not None:  # its keys and values are frozen
            q_seen, grad_seen, out_seen, lse_seen = (x[:, seen.rows] for x in (q, grad, out, lse))
            given = (grad_seen, q_seen, seen.keys, seen.values, out_seen, lse_seen)
            share, _, _ = _attend_backward(*given, *seen.lengths, False, scale)
            dq = dq.index_add(1, seen.rows, share.float())
        drawn = (grad.float() * out.float()).sum(-1)  # rowsum(do * o)
        for step in range(1, k.shape[1]):
            share = torch.exp(_score(q, k[:, step], scale) - lse)
            slope = scale * share * ((grad.float() * v[:, step].float()).sum(-1) - drawn)
            dq = dq + slope[..., None] * k[:, step].float()
            dks.append((slope[..., None] * q.float()).to(k.dtype))
            dvs.append((share[..., None] * grad.float()).to(v.dtype))
        return dq.to(q.dtype), torch.stack(dks, 1), torch.stack(dvs, 1), None, None


class _Seen(NamedTuple):
    """Holds what documents that are later pieces of sequences see before themselves.

    Rows of the pack (R,), keys and values (heads, C, D), and how many of both belong to each such document.
    """

    rows: Tensor
    keys: Tensor
    values: Tensor
    lengths: tuple[Sequence[int], Sequence[int]]

    @classmethod
    def of(cls, documents: Documents, like: Tensor, num_heads: int) -> _Seen | None:
        """Gather the contexts of `documents` in the type of `like`; None if there are none."""
        ends = list(accumulate(documents.lengths))
        found = [
            (torch.arange(end - length, end, device=like.device), *context)
            for length, end, context in zip(documents.lengths, ends, documents.contexts, strict=True)
            if context is not None
        ]
        if not found:
            return None
        rows, keys, values = zip(*found, strict=True)
        k, v = (torch.cat(parts, 2)[0].to(like.dtype) for parts in (keys, values))
        k, v = (x.repeat_interleave(num_heads // x.shape[0], 0) for x in (k, v))
        return cls(torch.cat(rows), k, v, ([len(part) for part in rows], [part.shape[2] for part in keys]))


def _score(q: Tensor, k: Tensor, scale: float) -> Tensor:
    return scale * (q.float() * k.float()).sum(-1)


# Attention of several documents one behind the other: q (heads, T, D), k and v (heads, S, D), of which `lengths` and
# `key_lengths` belong to each. On CUDA in 16 bit one kernel serves all documents, elsewhere each has its own.


def _is_flash(q: Tensor) -> bool:
    return q.is_cuda and q.dtype.itemsize == 2 and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256


@lru_cache(maxsize=16)  # a pack asks for the same in every step, forward and backward
def _starts(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    # From page-locked memory, or the host would wait for the device.
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32).pin_memory().to(device, non_blocking=True)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], key_lengths: Sequence[int], is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the output (heads, T, D), and the log-sum-exp of the scores in float32 (heads, T)."""
    if _is_flash(q):
        ends = (
            _starts(tuple(lengths), q.device),
            _starts(tuple(key_lengths), q.device),
            max(lengths),
            max(key_lengths),
        )
        given = [x.transpose(0, 1) for x in (q, k, v)]
        out, lse, *_ = _aten._flash_attention_forward(*given, *ends, 0.0, is_causal, False, scale=scale)
        return out.transpose(0, 1).contiguous(), lse
    outs, lses = [], []
    parts = zip(q.split([*lengths], 1), k.split([*key_lengths], 1), v.split([*key_lengths], 1), strict=True)
    for each in parts:
        given = [x[None] for x in each]
        if q.is_cuda:
            out, lse, *_ = _aten._scaled_dot_product_efficient_attention(
                *given, None, True, 0.0, is_causal, scale=scale
            )
            lse = lse[..., : out.shape[2]]
        else:
            out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(*given, 0.0, is_causal, scale=scale)
        outs.append(out[0])
        lses.append(lse[0])
    return torch.cat(outs, 1), torch.cat(lses, 1)


def _attend_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    lengths: Sequence[int],
    key_lengths: Sequence[int],
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the shares of these keys in the gradients of queries, keys and values, all of whose output is `out`."""
    if _is_flash(q):
        ends = (
            _starts(tuple(lengths), q.device),
            _starts(tuple(key_lengths), q.device),
            max(lengths),
            max(key_lengths),
        )
        given = [x.transpose(0, 1) for x in (grad, q, k, v, out)]
        unused = q.new_zeros(2, dtype=torch.uint64), q.new_zeros(0)  # random state, of no dropout
        found = _aten._flash_attention_backward(*given, lse.contiguous(), *ends, 0.0, is_causal, *unused, scale=scale)
        return tuple(x.transpose(0, 1) for x in found)
    results = []
    by_query = (x.split([*lengths], 1) for x in (grad, q, out, lse))
    by_key = (x.split([*key_lengths], 1) for x in (k, v))
    for pieces in zip(*by_query, *by_key, strict=True):
        grads, queries, outs, sums, keys, values = (x[None] for x in pieces)
        if q.is_cuda:
            sums = F.pad(sums, (0, -sums.shape[-1] % _EFFICIENT_ROWS), value=torch.inf)
            seed = torch.zeros(2, dtype=torch.int64).unbind()
            found = _aten._scaled_dot_product_efficient_attention_backward(
                grads, queries, keys, values, None, outs, sums, *seed, 0.0, [True] * 3 + [False], is_causal, scale=scale
            )
        else:
            found = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grads, queries, keys, values, outs, sums, 0.0, is_causal, scale=scale
            )
        results.append([x[0] for x in found[:3]])
    dq, dk, dv = (torch.cat(parts, 1) for parts in zip(*results, strict=True))
    return dq, dk, dv
