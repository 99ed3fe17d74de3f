"""DSpark heads: all drafts of a step in one pass, of several layers.

A block is a token of the text, the anchor, and masks behind it. Its rows attend to the target's states of all tokens
before the anchor, and to each other (DFlash, Chen et al. 2026, arXiv 2602.06036). To the logits of a mask's row a
matrix of low rank adds what the token before it says. These are the layers of `speculators`' `DSparkDraftModel`; tests
compare the two. Its forward draws anchors by waits for the device, and holds the logits of all rows at once.
"""

from dataclasses import dataclass
from math import exp
from typing import TYPE_CHECKING, Annotated, Any

import torch
from torch import Tensor
from typing_extensions import override

from tlt_lightning.arguments import Bound, Count, checked
from tlt_lightning.drafter import chunked_loss
from tlt_lightning.drafter.architectures.base import (
    DraftArchitecture,
    Drafting,
    Head,
    HeadSettings,
    Judge,
    layer_settings,
    speculation_of,
)
from tlt_lightning.drafter.chunked_loss import Predictions
from tlt_lightning.drafter.packing import PackedBatch

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_ROWS = 4096  # of blocks that are drafted together


@checked()
@dataclass(eq=False)
class DSpark(DraftArchitecture):
    """Drafts a block in one pass, which costs a step less than EAGLE-3 does, and gets fewer tokens accepted.

    Only vLLM's V2 model runner serves it, so it needs a GPU. Any draft length below the block is cut from it.

    Args:
        num_layers: Layers of the target's width. One learns next to nothing.
        block_size: Rows of a block: the anchor, and the most tokens that are drafted.
        markov_rank: Rank of the matrix from the token before.
        anchors: Most blocks of a training step, at even distances; a head of a new policy learns from each token less
            often than EAGLE-3's does, at less than half of its cost.
    """

    decay = exp(-1 / 4)  # as by default in `speculators`
    learns_in_turn = False

    num_layers: Count = 3
    block_size: Annotated[int, Bound(2, 64)] = 8
    markov_rank: Count = 64
    anchors: Count = 512

    def __post_init__(self) -> None:
        self.most_drafts = self.block_size - 1

    @override
    def build(self, settings: HeadSettings, target: "PretrainedConfig") -> Head:
        from speculators.models.dspark import DSparkDraftModel, DSparkSpeculatorConfig
        from transformers import Qwen3Config

        assert self.most_drafts is not None
        layers = Qwen3Config(num_hidden_layers=self.num_layers, **layer_settings(target))
        layers._attn_implementation = "sdpa"
        # A policy learns the embedding of its ends. Padding's may be zeros, and such a row asks all others alike.
        mask = target.pad_token_id if target.eos_token_id is None else target.eos_token_id
        config = DSparkSpeculatorConfig(
            transformer_layer_config=layers,
            draft_vocab_size=settings.draft_vocab_size,
            block_size=self.most_drafts + 1,
            aux_hidden_state_layer_ids=list(settings.layer_ids),
            mask_token_id=mask[0] if isinstance(mask, list) else mask or 0,  # no text goes on behind it
            sample_from_anchor=False,
            sliding_window_non_causal=True,  # else vLLM lets no row of a block see later ones
            markov_rank=self.markov_rank,
            enable_confidence_head=False,
            confidence_head_with_markov=False,
            speculators_config=speculation_of("dspark", settings),
        )
        return DSparkDraftModel(config)

    @override
    def restore(self, path: str, config: dict[str, Any], settings: HeadSettings) -> Head:
        from speculators.models.dspark import DSparkDraftModel, DSparkSpeculatorConfig

        wanted = {"sample_from_anchor": False, "markov_head_type": "vanilla", "enable_confidence_head": False}
        if found := {name: config.get(name) for name in wanted if config.get(name) != wanted[name]}:
            raise ValueError(f"`head` {path!r} was made with {found}, which is not trained here, but with {wanted}.")
        saved: Any = DSparkSpeculatorConfig.from_dict(config)
        saved.transformer_layer_config._attn_implementation = "sdpa"
        return DSparkDraftModel(saved)

    @override
    def sample(self, batch: PackedBatch) -> Tensor:
        """Return `anchors` entries, or all of a smaller pack, in their order; no wait for the device.

        Those that count come at even distances, as many as there is room for. The same text is laid out otherwise
        in every pack, so that its other entries get their turn.
        """
        counts = batch.loss_mask[0]
        number = (counts.cumsum(0) - 1) * self.anchors // counts.sum().clamp(min=self.anchors)
        chosen = number.diff(prepend=number.new_full((1,), -1)) > 0
        return chosen.byte().argsort(descending=True, stable=True)[: self.anchors]

    @override
    def predict(self, head: Head, batch: PackedBatch, wanted: Drafting) -> tuple[Predictions, Tensor]:
        weights, rows, judge = wanted.weights, wanted.rows, wanted.judge
        num_steps, num_entries = weights.shape
        agrees = torch.zeros_like(weights, dtype=torch.bool)
        result, total = Predictions(torch.zeros_like(weights), agrees, agrees.clone()), weights.new_zeros(())
        if rows is None:
            rows = (batch.loss_mask[0] | (weights > 0).any(0)).nonzero()[:, 0]
        # A pack of a prompt alone has no rows.
        for part in rows.split(max(1, _ROWS // head.block_size)) if len(rows) else ():
            features = draft(head, batch, part)[:, 1 : num_steps + 1].transpose(0, 1)  # (K, n, H)
            places = part + torch.arange(num_steps, device=part.device)[:, None]  # (K, n)
            places = places.clamp(max=num_entries - 1)  # what is behind the pack counts nowhere
            before = head.markov_head.prev_embeddings(batch.input_ids[0, places])
            found, loss = chunked_loss.predict(
                head,
                features.reshape(1, places.numel(), -1),
                batch.last_states[0, places.flatten()],
                wanted.terms,
                weights[:, part].reshape(1, -1),
                judge and _by_drafted_token(judge, part),
                compares=wanted.compares,
                bias=(before.reshape(1, places.numel(), -1), head.markov_head.markov_w2.weight),
            )
            total = total + loss
            for name in ("losses", "top1", "top3"):
                getattr(result, name)[:, part] = getattr(found, name).view(num_steps, -1)
        return result, total


def draft(head: Head, batch: PackedBatch, rows: Tensor) -> Tensor:
    """Return the head's features before its norm of the blocks whose anchors entries `rows` (n,) read: (n, block, H).

    A block sees the states of its document up to its own entry, wherever they lie: a later piece of a sequence also
    sees what is before it.
    """
    device, size = rows.device, head.block_size
    before = [(number, context.states) for number, context in enumerate(batch.contexts) if context is not None]
    states = torch.cat([batch.states[0], *(its.to(device, non_blocking=True) for _, its in before)])
    owners = torch.cat([batch.document_ids[0], *(torch.full((len(its),), n, device=device) for n, its in before)])
    positions = torch.cat([batch.position_ids[0], *(torch.arange(len(its), device=device) for _, its in before)])
    context = head.hidden_norm(head.fc(states.to(head.fc.weight.dtype)))[None]
    ids = torch.full((len(rows), size), head.mask_token_id, device=device)
    ids[:, 0] = batch.input_ids[0, rows]
    features = head.embed_tokens(ids.view(1, -1)).to(context.dtype)
    here = batch.position_ids[0, rows, None]
    at = here + 1 + torch.arange(size, device=device)
    embeddings = head.rotary_emb(context, torch.cat([positions, at.flatten()])[None])
    sees = (owners == batch.document_ids[0, rows, None]) & (positions <= here)
    own = torch.eye(len(rows), dtype=torch.bool, device=device).repeat_interleave(size, 1)
    mask = torch.cat([sees, own], 1).repeat_interleave(size, 0)
    for layer in head.layers:
        features = layer(
            hidden_states=features,
            target_hidden=context,
            attention_mask=mask[None, None],
            position_embeddings=embeddings,
        )
    return features[0].unflatten(0, (-1, size))


def _by_drafted_token(judge: Judge, rows: Tensor) -> chunked_loss.Watcher:
    """Return a watcher of entries `k * n + i`, which tells `judge` of token `k` drafted from entry `rows[i]`."""

    def watch(_: int, places: slice, logits: Tensor, targets: Tensor) -> None:
        flat = torch.arange(places.start, places.stop, device=rows.device)
        for step in range(places.start // len(rows), (places.stop - 1) // len(rows) + 1):
            is_its = flat // len(rows) == step
            judge(step, rows[flat[is_its] % len(rows)], logits[is_its], targets[is_its])

    return watch
