"""Blocks of a DSpark head by the functions of `speculators`: its loss, and what its drafts are worth."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from tlt_lightning.drafter.quality import AcceptanceRule, expect_acceptance
from tlt_lightning.hidden_states import PolicyText

GAMMA = 4.0  # decay of a row's weight in the loss over the rows, as by default in `speculators`


def pack_of(text: PolicyText, block_size: int) -> dict[str, Tensor]:
    """Lay a text out, with padding behind it so that no block reaches beyond."""
    length = len(text)
    tensors = {
        "hidden_states": text.states.float(),
        "verifier_last_hidden_states": text.last_states.float(),
        "input_ids": text.input_ids,
        "loss_mask": torch.arange(length) >= text.prompt_length,
        "document_ids": torch.zeros(length, dtype=torch.long),
        "position_ids": torch.arange(length),
    }
    return {
        name: pad(each, (0, 0) * (each.dim() - 1) + (0, block_size), value=-1 if name == "document_ids" else 0)[None]
        for name, each in tensors.items()
    }


def loss_of(head: Any, batch: dict[str, Tensor], num_anchors: int) -> Tensor:
    """Return the loss that `speculators` trains such heads with."""
    from speculators.losses import resolve_loss_config

    kl, tv = (resolve_loss_config(name, "eager") for name in ("kl_div", "tv"))
    with torch.compiler.set_stance("force_eager"):
        return head(**batch, max_anchors=num_anchors, loss_config=kl, tv_loss_fn=tv["tv"][0], gamma=GAMMA)[1]


@torch.no_grad()
@torch.compiler.set_stance("force_eager")  # each text has a length of its own
def measure(head: Any, texts: Sequence[PolicyText], rules: Sequence[AcceptanceRule]) -> Tensor:
    """Return, for each rule, the share of engine steps expected to accept the k-th draft and all before it: (rules, K).

    As `DraftQuality.accepted` of an EAGLE-3 head on the same texts.
    """
    num_drafts = head.block_size - 1
    sums = torch.zeros(len(rules), 2, num_drafts, dtype=torch.float64)
    for text in texts:
        batch, anchors = pack_of(text, head.block_size), torch.arange(text.prompt_length, len(text) - 1)
        batch["loss_mask"] = torch.zeros_like(batch["loss_mask"]).index_fill(1, anchors, True)
        hidden, logits, targets, _, places = head._backbone_forward(**batch, max_anchors=len(anchors))
        block, shape = places.view(len(anchors), -1), (len(anchors), head.block_size, -1)
        written = batch["input_ids"][0, block]
        before = pad(written[:, :-1], (1, 0))  # no draft is read from the anchor's row
        bias = head.markov_head.block_bias(prev_token_ids=before, hidden_states=hidden.view(shape))
        drafts, theirs = (
            each.view(shape)[:, 1:].flatten(0, 1).float() for each in (logits.view(shape) + bias, targets)
        )
        for rule, total in zip(rules, sums, strict=True):
            judged = rule.judge(drafts, theirs, written[:, 1:].flatten())
            rates, matches = (each.view(-1, num_drafts).T for each in judged)
            total += expect_acceptance(rates, matches, [len(anchors)], torch.ones(len(anchors), dtype=torch.bool)).sum(
                0
            )
    return sums[:, 0] / sums[:, 1].clamp(min=1)
