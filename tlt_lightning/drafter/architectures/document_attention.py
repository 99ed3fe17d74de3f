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
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

_aten = torch.ops.aten
_EFFICIENT_ROWS = 32  # to a multiple of which torch's memory-efficient kernel pads its log-sum-exp


@dataclass(frozen=True)
class Documents:
    """Says who attends to whom in a pack, in all of its steps.

    Args:
        lengths: Entries of each document.
        contexts: Keys and values before each document, (1, key heads, c, D) each, None where there are none.
    """

    lengths: Sequence[int]
    contexts: Sequence[tuple[Tensor, Tensor] | None]

    @cached_property
    def seen(self) -> _Seen | None:
        """Contexts of the documents that are later pieces of sequences; None if there are none such."""
        ends = list(accumulate(self.lengths))
        found = [
            (torch.arange(end - length, end, device=context[0].device), *context)
            for length, end, context in zip(self.lengths, ends, self.contexts, strict=True)
            if context is not None
        ]
        if not found:
            return None
        rows, keys, values = zip(*found, strict=True)
        k, v = in_autocast(*(torch.cat(parts, 2)[0] for parts in (keys, values)))
        return _Seen(torch.cat(rows), k, v, ([len(part) for part in rows], [part.shape[2] for part in keys]))


class _Seen(NamedTuple):
    """Holds rows of a pack (R,), the keys and values (key heads, C, D) before them, and how many each document has."""

    rows: Tensor
    keys: Tensor
    values: Tensor
    lengths: tuple[Sequence[int], Sequence[int]]


def in_autocast(*tensors: Tensor) -> list[Tensor]:
    """Return tensors in the type of products; rotary embeddings leave float32 behind."""
    device = tensors[0].device.type
    is_mixed = torch.is_autocast_enabled(device)
    return [tensor.to(torch.get_autocast_dtype(device)) if is_mixed else tensor for tensor in tensors]


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
    query, key, value = in_autocast(query, key, value)
    rows, used = query.shape[2], sum(attention_mask.lengths)
    keys, values = (x[0].unflatten(1, (-1, rows))[:, :, :used] for x in (key, value))
    result = _StepAttention.apply(query[0, :, :used], keys, values, attention_mask, options["scaling"])
    return F.pad(cast("Tensor", result), (0, 0, 0, rows - used)).transpose(0, 1)[None], None


class _StepAttention(torch.autograd.Function):
    """Attention of one step: queries (heads, T, D), keys and values of all steps so far (key heads, steps, T, D).

    Entries of steps 2 to `s` are in one tensor (key heads, group, s - 1, T, D), `group` being the heads of a key head:
    small heads are bound by the number of kernels. Products are taken in float32.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, documents: Documents, scale: float) -> Tensor:
        lengths, seen = documents.lengths, documents.seen
        out, lse = _attend(q, k[:, 0], v[:, 0], lengths, lengths, True, scale)
        own = lse.new_empty(0)
        if seen is not None:
            its, its_lse = _attend(q[:, seen.rows], seen.keys, seen.values, *seen.lengths, False, scale)
            its_lse = torch.full_like(lse, -torch.inf).index_copy(1, seen.rows, its_lse)
            whole = torch.logaddexp(lse, its_lse)
            out = out * torch.exp(lse - whole)[..., None]
            out, lse = out.index_add(1, seen.rows, its * torch.exp(its_lse - whole)[:, seen.rows, None]), whole
        if k.shape[1] > 1:
            scores = scale * (_grouped(q, k).float() * k[:, None, 1:]).sum(-1)  # (key heads, group, s - 1, T)
            whole = torch.cat([_grouped(lse, k), scores], 2).logsumexp(2, keepdim=True)
            own = torch.exp(scores - whole)
            from_own = (own[..., None] * v[:, None, 1:]).sum(2)
            out = (_grouped(out, k) * torch.exp(_grouped(lse, k) - whole)[..., None])[:, :, 0] + from_own
            out, lse = out.flatten(0, 1), whole[:, :, 0].flatten(0, 1)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse, own)
        ctx.documents, ctx.scale = documents, scale
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, own = ctx.saved_tensors
        documents: Documents = ctx.documents
        lengths, seen, scale = documents.lengths, documents.seen, ctx.scale
        grad = gradients[0].transpose(0, 1).contiguous().transpose(0, 1)  # as `out` lies
        dq, dk, dv = _attend_backward(grad, q, k[:, 0], v[:, 0], out, lse, lengths, lengths, True, scale)
        dk, dv = dk[:, None], dv[:, None]
        if seen is not None:  # its keys and values are frozen
            q_seen, grad_seen, out_seen, lse_seen = (x[:, seen.rows] for x in (q, grad, out, lse))
            given = (grad_seen, q_seen, seen.keys, seen.values, out_seen, lse_seen)
            share, _, _ = _attend_backward(*given, *seen.lengths, False, scale)
            dq = dq.float().index_add(1, seen.rows, share.float())
        if k.shape[1] > 1:
            slopes = grad.float()
            drawn = (slopes * out).sum(-1)  # rowsum(do * o)
            slopes = _grouped(slopes, k)
            each = scale * own * ((slopes * v[:, None, 1:]).sum(-1) - _grouped(drawn, k))
            dq = dq + (each[..., None] * k[:, None, 1:]).sum(2).flatten(0, 1)
            dk = torch.cat([dk, (each[..., None] * _grouped(q, k)).sum(1).to(k.dtype)], 1)
            dv = torch.cat([dv, (own[..., None] * slopes).sum(1).to(v.dtype)], 1)
        return dq.to(q.dtype), dk, dv, None, None


def _grouped(x: Tensor, key: Tensor) -> Tensor:
    """View heads (heads, T, ...) by their key heads, beside the steps: (key heads, group, 1, T, ...)."""
    return x.unflatten(0, (len(key), -1))[:, :, None]


# Attention of several documents one behind the other: q (heads, T, D), k and v (key heads, S, D), of which `lengths`
# and `key_lengths` belong to each. On CUDA in 16 bit one kernel serves all documents and groups of heads, elsewhere
# each document has its own, and each head keys of its own.


def _is_flash(q: Tensor) -> bool:
    return q.is_cuda and q.dtype.itemsize == 2 and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256


@lru_cache(maxsize=16)  # a pack asks for the same in every step, forward and backward
def _starts(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    # From page-locked memory, or the host would wait for the device.
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32).pin_memory().to(device, non_blocking=True)


def _ends(lengths: Sequence[int], key_lengths: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor, int, int]:
    """Return the kernel's arguments about documents: starts of queries and of keys, and the longest of both."""
    starts = (_starts(tuple(each), device) for each in (lengths, key_lengths))
    return *starts, max(lengths), max(key_lengths)  # type: ignore[return-value]


def _attend(
    q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], key_lengths: Sequence[int], is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the output (heads, T, D), and the log-sum-exp of the scores in float32 (heads, T)."""
    if _is_flash(q):
        ends = _ends(lengths, key_lengths, q.device)
        given = [x.transpose(0, 1) for x in (q, k, v)]
        out, lse, *_ = _aten._flash_attention_forward(*given, *ends, 0.0, is_causal, False, scale=scale)
        return out.transpose(0, 1), lse
    outs, lses = [], []
    k, v = (x.repeat_interleave(len(q) // len(x), 0) for x in (k, v))
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
        ends = _ends(lengths, key_lengths, q.device)
        given = [x.transpose(0, 1) for x in (grad, q, k, v, out)]
        unused = q.new_zeros(2, dtype=torch.uint64), q.new_zeros(0)  # random state, of no dropout
        found = _aten._flash_attention_backward(*given, lse.contiguous(), *ends, 0.0, is_causal, *unused, scale=scale)
        return tuple(x.transpose(0, 1) for x in found)
    results = []
    num_key_heads = len(k)
    k, v = (x.repeat_interleave(len(q) // len(x), 0) for x in (k, v))
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
    return dq, *(x.unflatten(0, (num_key_heads, -1)).sum(1) for x in (dk, dv))
