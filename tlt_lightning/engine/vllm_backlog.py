"""What a skipped drafter has missed, and how it catches up in one small batch.

While speculation is off the drafter reads nothing, and its attention cache gets a hole at every token emitted
meanwhile. vLLM's own remedy is a drafter pass in every step. A drafter of one layer needs far less: the key and the
value at a position depend only on the token there and on the target's hidden states, not on the drafter's attention,
its MLP or its head. So the hidden states are kept, and once in a while the missing keys and values are computed for
all of them together: two matrix products that cost about as much for a thousand tokens as for one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tlt_lightning.engine.vllm_internals import reach

SlotsOf = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class _Missed:
    request_ids: tuple[str, ...]
    hidden: Tensor  # (B, layers * H)
    next_ids: Tensor  # (B,)
    positions: Tensor  # (B,)


class DrafterBacklog:
    """Hidden states of the tokens emitted since the drafter last ran, at most `max_steps` steps of them.

    Args:
        model: The drafter, vLLM's `Eagle3LlamaForCausalLM` with one layer.
        max_steps: Steps after which the backlog is worked off even though speculation is still off: bounds its memory
            (a 7B policy has 21 KB of hidden states a token) and the time of catching up.
    """

    def __init__(self, model: Any, max_steps: int = 16) -> None:
        check_catches_up(model)
        self.model = model
        self.max_steps = max_steps
        self.num_flushes = 0
        self._missed: list[_Missed] = []

    def __len__(self) -> int:
        """Steps in the backlog."""
        return len(self._missed)

    @property
    def is_full(self) -> bool:
        """True if the backlog must be worked off now."""
        return len(self._missed) >= self.max_steps

    def add(self, request_ids: Sequence[str], hidden: Tensor, next_ids: Tensor, positions: Tensor) -> None:
        """Remember a step in which every request decoded one token.

        Args:
            request_ids: The requests, in the order of the tensors' rows.
            hidden: The target's hidden states at the step's tokens, (B, layers * H).
            next_ids: The tokens that followed, (B,).
            positions: Positions of the step's tokens, (B,).

        The tensors are kept, so they must not be views of buffers that the next step overwrites.
        """
        self._missed.append(_Missed(tuple(request_ids), hidden, next_ids, positions))

    def clear(self) -> None:
        """Forget everything: the requests are gone or are read again from the start."""
        self._missed.clear()

    @torch.inference_mode()
    def flush(self, row_of: Mapping[str, int], slots_of: SlotsOf) -> None:
        """Write the missing keys and values of the requests that are still there.

        Args:
            row_of: Row of each live request in the block table; others have nothing left to catch up with.
            slots_of: Cache slots for rows (N,) and positions (N,).
        """
        missed, self._missed = self._missed, []
        rows = [row_of.get(request_id, -1) for step in missed for request_id in step.request_ids]
        kept = [index for index, row in enumerate(rows) if row >= 0]
        if not kept:
            return
        device = missed[0].hidden.device
        picked = torch.tensor(kept, device=device)
        positions = torch.cat([step.positions for step in missed])[picked]
        slots = slots_of(torch.tensor([rows[index] for index in kept], device=device), positions)
        hidden = torch.cat([step.hidden for step in missed])[picked]
        write_keys(self.model, hidden, torch.cat([step.next_ids for step in missed])[picked], positions, slots)
        self.num_flushes += 1


def write_keys(model: Any, hidden: Tensor, next_ids: Tensor, positions: Tensor, slots: Tensor) -> None:
    """Compute the drafter's keys and values at given positions and write them into its cache.

    Args:
        model: The drafter.
        hidden: The target's hidden states, (N, layers * H).
        next_ids: Token after each, (N,).
        positions: Position of each, (N,).
        slots: Where the cache keeps it, (N,).
    """
    layer = model.model.layers[0]
    attention = layer.self_attn
    combined = model.combine_hidden_states(hidden)
    embedded = layer.input_layernorm(model.model.embed_tokens(next_ids))
    normed, _ = layer._residual_norm(hidden_states=combined)
    projected, _ = attention.qkv_proj(torch.cat([embedded, normed], dim=-1))
    query, key, value = projected.split([attention.q_size, attention.kv_size, attention.kv_size], dim=-1)
    _, key = attention.rotary_emb(positions, query.contiguous(), key.contiguous())
    cache = attention.attn
    shape = (-1, cache.num_kv_heads, cache.head_size)
    cache.impl.do_kv_cache_update(cache, key.view(shape), value.contiguous().view(shape), cache.kv_cache, slots)


def check_catches_up(model: Any) -> None:
    """Raise ValueError unless the drafter's keys depend on its inputs alone, and RuntimeError if vLLM has moved."""
    layers = reach(model, "model.layers")
    if type(model).__name__ != "Eagle3LlamaForCausalLM" or len(layers) != 1:
        raise ValueError(
            f"`speculation.catch_up` is 'deferred', which needs an EAGLE-3 head of one Llama layer; this one is a "
            f"{type(model).__name__} of {len(layers)} layers. Use 'reprefill'."
        )
    for path in (
        "self_attn.qkv_proj",
        "self_attn.rotary_emb",
        "self_attn.q_size",
        "self_attn.kv_size",
        "_residual_norm",
    ):
        reach(layers[0], path)
    reach(layers[0], "self_attn.attn.impl.do_kv_cache_update")
