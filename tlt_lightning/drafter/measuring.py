"""Measure how well a head drafts a pack of text that its target wrote."""

from typing import Any

import torch
from torch import Tensor

from tlt_lightning.drafter import chunked_loss
from tlt_lightning.drafter.architectures.base import DraftArchitecture, Drafting, Head
from tlt_lightning.drafter.architectures.training_time_test import shifted, step_masks
from tlt_lightning.drafter.packing import PackedBatch
from tlt_lightning.drafter.quality import AcceptanceRule, expect_acceptance
from tlt_lightning.drafter.vocabulary import draft_ids


@torch.no_grad()
def measure_pack(
    architecture: DraftArchitecture,
    head: Head,
    batch: PackedBatch,
    *,
    num_draft_tokens: int,
    rule: AcceptanceRule,
    loss: str,
) -> Tensor:
    """Return each document's sums for `quality_of`: (documents, 6, K) on the CPU.

    The sums add up over documents, packs and ranks. Acceptance is expected over the text as the target wrote it; text
    of an older policy measures acceptance by that one.

    Args:
        architecture: The head's.
        head: Head with its target's weights.
        batch: The pack.
        num_draft_tokens: Drafts of a step, K.
        rule: How the engine drafts and accepts.
        loss: Losses to sum up, as `terms_of` reads them.
    """
    masks = step_masks(batch, num_draft_tokens, head.t2d)
    weights = masks.float()
    rates, matches = torch.zeros_like(weights), torch.zeros_like(weights)
    written = draft_ids(head, batch.next_ids[0])

    def judge(step: int, rows: Any, logits: Tensor, targets: Tensor) -> None:
        tokens = shifted(written, step)[rows]
        rates[step, rows], matches[step, rows] = rule.judge(logits, targets, tokens)

    terms = chunked_loss.terms_of(loss, batch.states)
    predictions, _ = architecture.predict(head, batch, Drafting(terms, weights, judge=judge))
    steps = expect_acceptance(rates, matches, batch.lengths, batch.loss_mask[0])
    sums = torch.stack([predictions.top1 & masks, predictions.top3 & masks, predictions.losses * weights, masks])
    by_document = torch.zeros(len(batch.lengths), *sums.shape[:2], dtype=torch.float64)
    documents = batch.document_ids[0].clamp(min=0).cpu()  # nothing counts in padding
    by_document.index_add_(0, documents, sums.double().cpu().movedim(-1, 0))
    return torch.cat([steps, by_document], 1)
