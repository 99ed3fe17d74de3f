"""Run the head over a pack: several drafts an entry, each from features of the last.

This is the pass of `speculators`' `Eagle3DraftModel.forward` (training-time test); tests compare the two. It is written
out because the vocabulary comes in chunks, and that forward is compiled wherever a GPU
is visible, which takes longer than an idle window lasts. Attention keeps documents apart (`document_attention`), and a
piece of a sequence attends to all that is before it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tlt_lightning.drafter.architectures.document_attention import Documents
from tlt_lightning.drafter.packing import Context, PackedBatch

if TYPE_CHECKING:
    from speculators.models.eagle3 import Eagle3DraftModel

_ROWS = 1024  # of a context, read at a time


def unroll(head: Eagle3DraftModel, batch: PackedBatch, num_steps: int) -> Tensor:
    """Return the head's features before its norm, (num_steps, T, H).

    In step `k` an entry reads the token that the text has there (a draft that differs is rejected, so what follows it
    never counts), attends to the first step's entries of its document up to itself, and to its own earlier steps.
    """
    from transformers import DynamicCache

    documents = Documents(batch.lengths, [context and keys_of(head, context) for context in batch.contexts])
    fused = head.fc(batch.states.to(head.fc.weight.dtype))  # (1, T, H)
    length = batch.input_ids.shape[1]
    embedded = head.embed_tokens(F.pad(batch.input_ids, (0, num_steps))).to(fused.dtype)
    position_ids = batch.position_ids + torch.arange(num_steps, device=fused.device)[:, None]  # a row a step
    cosines, sines = head.rotary_emb(fused, position_ids)
    cache, features, per_step = DynamicCache(), fused, []
    for step in range(num_steps):
        features = head.layers[0](
            torch.cat([embedded[:, step : step + length], features], -1),
            attention_mask=documents,
            position_ids=position_ids[step, None],
            past_key_values=cache,
            position_embeddings=(cosines[step, None], sines[step, None]),
        )
        per_step.append(features[0])
    return torch.stack(per_step)


@torch.no_grad()
def keys_of(head: Eagle3DraftModel, context: Context) -> tuple[Tensor, Tensor]:
    """Return the head's first-step keys and values over a context, (1, key heads, c, D) each.

    They follow from each entry alone, for a head has one layer. They are frozen: a context teaches nothing.
    """
    from transformers import DynamicCache

    layer: Any = head.layers[0]
    cache, device, num_entries = DynamicCache(), head.fc.weight.device, len(context.input_ids)
    for start in range(0, num_entries, _ROWS):
        here = slice(start, min(start + _ROWS, num_entries))
        states, ids = (part[None, here].to(device, non_blocking=True) for part in (context.states, context.input_ids))
        fused = head.fc(states.to(head.fc.weight.dtype))
        embedded = head.embed_tokens(ids).to(fused.dtype)
        positions = torch.arange(here.start, here.stop, device=device)[None]
        layer.self_attn(
            hidden_states=torch.cat([layer.input_layernorm(embedded), layer.hidden_norm(fused)], -1),
            attention_mask=None,
            past_key_values=cache,
            position_embeddings=head.rotary_emb(fused, positions),  # of the type that `unroll` has
        )
    kept: Any = cache.layers[0]
    return kept.keys, kept.values


def shifted(values: Tensor, steps: int) -> Tensor:
    """Move the last dimension to the left by `steps` entries; zeros come in from the right."""
    return F.pad(values[..., steps:], (0, steps))


def step_masks(batch: PackedBatch, num_steps: int, t2d: Tensor | None) -> Tensor:
    """Mark entries of each step whose draft is part of a response, (num_steps, T) bool.

    Tokens outside a reduced vocabulary do not count. The text is a sample of the policy, so a position counts as often
    as the policy stays within the vocabulary there, which is what its renormalised distribution is worth.
    """
    counts = batch.loss_mask[0]
    if t2d is not None:
        counts = counts & t2d[batch.next_ids[0]]
    documents = batch.document_ids[0]
    return torch.stack([shifted(counts, step) & (shifted(documents, step) == documents) for step in range(num_steps)])
