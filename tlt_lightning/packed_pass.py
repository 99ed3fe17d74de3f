"""Run a policy's trunk over sequences laid end to end: no padding is computed, and no sequence sees another.

The `varlen` attention registered here is told where each sequence starts and needs no mask: in 16 bit on CUDA it is
torch's variable-length flash attention, elsewhere `sdpa` over one sequence after the other. Under any other attention
position ids that restart tell sequences apart: transformers makes a block-causal mask of them, which is exact, too, but
quadratic in the pack's length.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

VARLEN = "varlen"
"""Name of the attention that `register_varlen` gives to transformers."""

IS_PACKABLE = "_keeps_packed_sequences_apart"
"""Attribute of a trunk in which `note_if_packable` notes its result."""
_needs_no_mask: ContextVar[bool] = ContextVar("needs_no_mask", default=False)


@dataclass(frozen=True, slots=True)
class Pack:
    """Sequences laid end to end.

    Args:
        input_ids: Tokens of all sequences. (N,), int64
        position_ids: Place of each token in its sequence. (N,), int64
        starts: First place of each sequence, and N. (B + 1,), int32
        longest: Tokens of the longest sequence.
    """

    input_ids: Tensor
    position_ids: Tensor
    starts: Tensor
    longest: int

    @classmethod
    def of(cls, input_ids: Tensor, lengths: Tensor) -> Pack:
        """Lay right-padded sequences (B, S) of the given lengths (B,) end to end."""
        places = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        is_token = places < lengths[:, None]
        starts = nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
        return cls(input_ids[is_token], places[is_token], starts, int(lengths.max()))


def packed_states(trunk: nn.Module, pack: Pack) -> Tensor:
    """Return the trunk's last hidden states of every token of a pack, (N, H)."""
    given: dict[str, Any] = {"input_ids": pack.input_ids[None], "position_ids": pack.position_ids[None]}
    is_varlen = trunk.config._attn_implementation == VARLEN  # type: ignore[union-attr]
    if is_varlen:
        given |= {"cu_seq_lens_q": pack.starts, "max_length_q": pack.longest}
    with without_mask() if is_varlen else nullcontext():
        return trunk(**given, use_cache=False).last_hidden_state[0]


def can_pack(trunk: nn.Module) -> bool:
    """Return True if `note_if_packable` has found that a trunk keeps the sequences of a pack apart."""
    return bool(getattr(trunk, IS_PACKABLE, False))


@torch.no_grad()
def note_if_packable(trunk: nn.Module) -> bool:
    """Return True if a trunk keeps the sequences of a pack apart, and note it for `can_pack`.

    Attention does, a recurrence does not, and neither does a model that pays no heed to position ids. So two short
    sequences are tried: packed, they must have the states that each has alone. In 16 bit deep trunks round both by
    percents, so there the error is weighed against what it is where the second does see the first. What so short a
    trial cannot show, such as attention in chunks, is known by the config's names for its layers.
    """
    config: Any = trunk.config
    kinds = set(getattr(config, "layer_types", None) or ())
    is_packable = not getattr(trunk, "_is_stateful", False) and kinds <= {"full_attention", "sliding_attention"}
    if is_packable := is_packable and "position_ids" in inspect.signature(trunk.forward).parameters:
        weight = next(trunk.parameters())
        ids = torch.arange(1, 9, device=weight.device)[None] % config.get_text_config().vocab_size
        parts = ids.split([3, 5], 1)
        alone = torch.cat([trunk(input_ids=part, use_cache=False).last_hidden_state[0] for part in parts])
        pack = Pack.of(pad_sequence([part[0] for part in parts], batch_first=True), torch.tensor([3, 5]))
        error = (packed_states(trunk, pack) - alone).abs().max()
        is_packable = bool(error < (1e-4 if weight.dtype.itemsize >= 4 else 2e-2) * alone.abs().max())
        if not is_packable and weight.dtype.itemsize < 4:
            mixed = trunk(input_ids=ids, use_cache=False).last_hidden_state[0]
            is_packable = bool(error < (mixed - alone).abs().max() / 20)
    setattr(trunk, IS_PACKABLE, is_packable)
    return is_packable


@contextmanager
def without_mask() -> Iterator[None]:
    """Make no mask for the `varlen` attention in the block, which without starts of sequences sees one sequence."""
    token = _needs_no_mask.set(True)
    try:
        yield
    finally:
        _needs_no_mask.reset(token)


def _one_by_one(
    query: Tensor, key: Tensor, value: Tensor, starts: list[int], window: int | None, **options: Any
) -> Tensor:
    """Return attention within each sequence alone, (1, N, heads, D), of (1, heads, N, D) each."""
    results = []
    for start, stop in pairwise(starts):
        q, k, v = (part[:, :, start:stop] for part in (query, key, value))
        mask = None
        if window is not None and stop - start > window:
            mask = torch.ones(stop - start, stop - start, dtype=torch.bool, device=query.device).tril()
            mask = mask.triu(1 - window)
        results.append(
            nn.functional.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True, **options
            )
        )
    return torch.cat(results, 2).transpose(1, 2)


@cache
def register_varlen() -> str:
    """Give transformers the `varlen` attention, which is `sdpa` wherever no pack is told of; return its name."""
    from torch.nn.attention.varlen import varlen_attn
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    # Key and value heads may be fewer than queries'; torch 2.13 wants to be told, releases before just compute it.
    grouped = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}

    def attention(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        sliding_window: int | None = None,
        cu_seq_lens_q: Tensor | None = None,
        max_length_q: int | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        if cu_seq_lens_q is None:
            return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
        # Rotary embeddings that are not fused leave float32 under autocast, which knows `sdpa` but not the kernel.
        device = query.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else query.dtype
        query, key, value = (part.to(dtype) for part in (query, key, value))
        if device != "cuda" or dtype.itemsize > 2:
            starts = cu_seq_lens_q.tolist()
            return _one_by_one(query, key, value, starts, sliding_window, scale=scaling), None
        options: dict[str, Any] = {
            "scale": scaling,
            "window_size": (-1 if sliding_window is None else sliding_window - 1, 0),
            **grouped,
        }
        query, key, value = (part[0].transpose(0, 1) for part in (query, key, value))  # (N, heads, D) each
        assert max_length_q is not None
        ends = (cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q)
        return cast("Tensor", varlen_attn(query, key, value, *ends, **options))[None], None

    def mask(*args: Any, **kwargs: Any) -> Tensor | None:
        return None if _needs_no_mask.get() else sdpa_mask(*args, **kwargs)

    AttentionInterface.register(VARLEN, attention)
    AttentionMaskInterface.register(VARLEN, mask)
    return VARLEN
