"""Compute the keys and values that a skipped head missed, in one small batch.

While speculation is off the head reads nothing, and its cache gets a hole at every token emitted meanwhile. vLLM's own
remedy is a drafter pass in every step. In a drafter of one layer the key and the value at a position depend only on the
token there and on the target's hidden states, not on the drafter's attention, MLP or head. So the hidden states are
kept, and once in a while all missing keys and values are computed together: two matrix products that cost about as much
for a few hundred tokens as for one. So are those of a block head, all of whose layers see the target's states alone.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tlt_lightning.engine.vllm.internals import reach

MAX_STEPS = 16
"""Steps after which the head catches up though speculation is still off: bounds the time it takes."""

MAX_TOKENS = 1024
"""Tokens after which it does, or those of the largest batch if more; 21 KB of hidden states each (7B policy)."""


class KVCatchUp:
    """Keeps hidden states of the tokens that the head skipped, of at most `MAX_STEPS` steps.

    A step costs three small copies into one buffer on the device, no allocation, no wait. Large batches fill the buffer
    sooner: from a few hundred tokens on, catching up takes longer with each token, and waiting for more saves nothing.

    Args:
        model: The drafter, vLLM's `Eagle3LlamaForCausalLM` with one layer, or a block head.
        max_batch_size: Most requests of a step.
    """

    def __init__(self, model: Any, max_batch_size: int) -> None:
        check_catches_up(model)
        self.model = model
        self.max_tokens = max(MAX_TOKENS, max_batch_size)
        self.num_flushes = 0
        self._steps: list[Sequence[str]] = []  # the requests of each step
        self._num_tokens = 0
        self._hidden = self._next_ids = self._positions = torch.empty(0)

    def __len__(self) -> int:
        """Return the number of steps to catch up with."""
        return len(self._steps)

    def has_room(self, batch_size: int) -> bool:
        """Return False if the head must catch up before a step of `batch_size` requests."""
        return len(self._steps) < MAX_STEPS and self._num_tokens + batch_size <= self.max_tokens

    def add(
        self,
        request_ids: Sequence[str],
        hidden: Sequence[Tensor],
        last_ids: Tensor,
        positions: Tensor,
        rows: Tensor | None = None,
    ) -> None:
        """Remember a step in which every request decoded one token.

        Args:
            request_ids: The requests, in the order of the tensors' rows; kept as it is.
            hidden: The target's hidden states at the step's tokens, side by side: each (B, H).
            last_ids: The tokens that followed, (B,); with `rows` of more requests than these.
            positions: Positions of the step's tokens, (B,).
            rows: Where in `last_ids` each request's token is, (B,); None if they are in order.
        """
        if not self._hidden.numel():
            self._hidden = hidden[0].new_empty(self.max_tokens, sum(part.shape[1] for part in hidden))
            self._next_ids = last_ids.new_empty(self.max_tokens)
            self._positions = positions.new_empty(self.max_tokens)
        start, end = self._num_tokens, self._num_tokens + len(request_ids)
        torch.cat(list(hidden), dim=-1, out=self._hidden[start:end])
        if rows is None:
            self._next_ids[start:end].copy_(last_ids)
        else:
            torch.index_select(last_ids, 0, rows, out=self._next_ids[start:end])
        self._positions[start:end].copy_(positions)
        self._steps.append(request_ids)
        self._num_tokens = end

    def clear(self) -> None:
        """Forget all steps: the requests are gone or are read again from the start."""
        self._steps, self._num_tokens = [], 0

    def drop(self, request_ids: Collection[str]) -> None:
        """Forget preempted requests, which lose their blocks and read everything anew later."""
        self._steps = [["" if name in request_ids else name for name in step] for step in self._steps]

    @torch.inference_mode()
    def flush(self, row_of: Mapping[str, int], block_table: Tensor, block_size: int) -> None:
        """Write the missing keys and values of the requests that are still there.

        Args:
            row_of: Row of each live request in the block table; others have nothing left to catch up with.
            block_table: Blocks of each request, (rows, blocks).
            block_size: Tokens of a block.
        """
        rows = [row_of.get(request_id, -1) for request_ids in self._steps for request_id in request_ids]
        kept = [index for index, row in enumerate(rows) if row >= 0]
        inputs = self._hidden, self._next_ids, self._positions
        self.clear()
        if not kept:
            return
        device = self._hidden.device
        if len(kept) == len(rows):
            hidden, next_ids, positions = (tensor[: len(rows)] for tensor in inputs)
        else:
            picked = _to_device(kept, device)
            hidden, next_ids, positions = (tensor[picked] for tensor in inputs)
        live = _to_device([rows[index] for index in kept], device)
        # A cache slot is the block that holds the position, and the place in it.
        slots = block_table[live, positions // block_size].long() * block_size + positions % block_size
        write_keys(self.model, hidden, next_ids, positions, slots)
        self.num_flushes += 1


def _to_device(values: Sequence[int], device: torch.device) -> Tensor:
    """Return a tensor, copied without a wait, which would empty the pipeline of steps under way."""
    tensor = torch.tensor(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def write_keys(model: Any, hidden: Tensor, next_ids: Tensor, positions: Tensor, slots: Tensor) -> None:
    """Compute the drafter's keys and values at given positions and write them into its cache.

    Args:
        model: The drafter.
        hidden: The target's hidden states, (N, layers * H).
        next_ids: Token after each, (N,).
        positions: Position of each, (N,).
        slots: Where the cache keeps it, (N,).
    """
    if is_block_head(model):
        model.precompute_and_store_context_kv(model.combine_hidden_states(hidden), positions, slots)
        return
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


def is_block_head(model: Any) -> bool:
    """Return True if the drafter writes a block in one pass, of which the target's states alone are kept."""
    return hasattr(model, "precompute_and_store_context_kv")


def check_catches_up(model: Any) -> None:
    """Raise ValueError unless keys depend on inputs alone, RuntimeError if the attention backend cannot write them."""
    layers = reach(model, "model.layers")
    if is_block_head(model):
        return
    if type(model).__name__ != "Eagle3LlamaForCausalLM" or len(layers) != 1:
        raise ValueError(
            "`speculation.head` must be an EAGLE-3 head of one Llama layer or a block head, to catch up after being "
            f"off; this one is a {type(model).__name__} of {len(layers)} layers."
        )
    reach(layers[0], "self_attn.attn.impl.do_kv_cache_update")
