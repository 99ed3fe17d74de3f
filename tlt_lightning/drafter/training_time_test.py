"""Run the head over a pack: several drafts an entry, each from features of the last.

This is the pass of `speculators`' `Eagle3DraftModel.forward` (training-time test); tests compare the two. It is written
out because regression needs the features, the vocabulary comes in chunks, and that forward is compiled wherever a GPU
is visible, which takes longer than an idle window lasts. Attention runs document by document: its cost follows the
lengths of the sequences and not the square of the pack's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tlt_lightning.drafter.packing import PackedBatch

if TYPE_CHECKING:
    from speculators.models.eagle3 import Eagle3DraftModel


def unroll(head: Eagle3DraftModel, batch: PackedBatch, num_steps: int) -> tuple[Tensor, Tensor]:
    """Return the head's features before its norm, (num_steps, T, H), and the fused ones, (T, H).

    In step `k` an entry reads the token that the text has there (a draft that differs is rejected, so what follows it
    never counts), attends to the first step's entries of its document up to itself, and to its own earlier steps.
    """
    from transformers import DynamicCache

    lengths = batch.lengths
    fused = head.fc(batch.states.to(head.fc.weight.dtype))  # (1, T, H)
    cache, features, per_step = DynamicCache(), fused, []
    for step in range(num_steps):
        embedded = head.embed_tokens(shifted(batch.input_ids, step)).to(features.dtype)
        states = torch.cat([embedded, features], -1)
        position_ids = batch.position_ids + step
        features = head.layers[0](
            states,
            attention_mask=lengths,
            position_ids=position_ids,
            past_key_values=cache,
            position_embeddings=head.rotary_emb(states, position_ids),
        )
        per_step.append(features[0])
    return torch.stack(per_step), fused[0]


def attend_in_documents(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Sequence[int], **options: Any
) -> tuple[Tensor, None]:
    """Attend within documents; `transformers` calls this for heads.

    Args:
        module: The attention layer.
        query: Queries of the current step. (1, heads, T, D)
        key: Keys of all steps so far, one behind the other. (1, key heads, steps * T, D)
        value: Values likewise.
        attention_mask: Entries of each document of the pack, which need not fill it.
        options: `scaling`, and others that heads do not use.
    """
    num_entries, lengths = query.shape[2], attention_mask
    num_steps = key.shape[2] // num_entries
    groups = query.shape[1] // key.shape[1]
    keys, values = (x.repeat_interleave(groups, 1).unflatten(2, (num_steps, -1)) for x in (key, value))
    rest = num_entries - sum(lengths)
    # Split, not sliced: the gradient of a slice is a whole tensor of zeros around it.
    parts = zip(query.split([*lengths, rest], 2), *(x.split([*lengths, rest], 3) for x in (keys, values)), strict=True)
    masks = step_masks_of(lengths, num_steps, query.device)
    outputs = [
        F.scaled_dot_product_attention(
            q, k.flatten(2, 3), v.flatten(2, 3), attn_mask=mask, is_causal=mask is None, scale=options["scaling"]
        )
        for mask, (q, k, v) in zip(masks, parts, strict=False)
    ]
    return F.pad(torch.cat(outputs, 2), (0, 0, 0, rest)).transpose(1, 2), None


def step_masks_of(lengths: Sequence[int], num_steps: int, device: torch.device) -> Iterator[Tensor | None]:
    """Yield each document's mask in the last of `num_steps` steps; None is plain causal.

    An entry sees the first step's entries up to itself, and itself in later steps: (length, num_steps * length).
    """
    if num_steps == 1:
        yield from [None] * len(lengths)
        return
    longest = max(lengths)
    own = torch.eye(longest, dtype=torch.bool, device=device)
    causal = torch.ones_like(own).tril()
    for length in lengths:
        yield torch.cat([causal[:length, :length], *[own[:length, :length]] * (num_steps - 1)], -1)


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


def regress(features: Tensor, fused: Tensor, documents: Tensor, masks: Tensor, decay: Tensor) -> Tensor:
    """Measure how far features are from the fused ones that they stand in for.

    The distance is relative to the size of those, which the head is free to choose, and pulls on both: the head's
    output must also predict a token, which a mere projection of the target's states does not.

    `features` are (num_steps, T, H), `fused` (T, H), `documents` the number of each entry's document (T,), `masks`
    where the loss counts (num_steps, T), and `decay` the weight of each step (num_steps,).
    """
    features, fused = features.float(), fused.float()
    scale = fused.square().mean(-1, keepdim=True).clamp(min=1e-12).rsqrt()
    total = features.new_zeros(())
    for step, mask in enumerate(masks):
        goal, its_scale = (F.pad(x[step + 1 :], (0, 0, 0, step + 1)) for x in (fused, scale))
        counts = mask & (shifted(documents, step + 1) == documents)
        distance = F.smooth_l1_loss(features[step] * its_scale, goal * its_scale, reduction="none").mean(-1)
        total = total + decay[step] * (distance * counts).sum() / counts.sum().clamp(min=1)
    return total
