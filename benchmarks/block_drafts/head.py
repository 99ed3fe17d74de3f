"""Build, train and measure block drafters: heads of `speculators` that write all drafts in one pass.

A block is a token of the text, the anchor, and masks behind it. Its rows attend to the target's states of all tokens
before the anchor, and to each other. DFlash (Chen et al. 2026, arXiv 2602.06036) takes each row's distribution as it
is. DSpark adds to it what a matrix of low rank says of the token drafted before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from tlt_lightning.drafter.quality import AcceptanceRule, expect_acceptance
from tlt_lightning.drafter.target import choose_layer_ids
from tlt_lightning.hidden_states import PolicyText

GAMMA = 4.0  # decay of a row's weight in the loss over the rows, as by default in `speculators`
ROWS_AT_ONCE = 4096  # of blocks that are measured together


def head_config(kind: str, policy: str, target: Any, num_layers: int, block_size: int) -> Any:
    """Configure a head of `num_layers` layers as wide as the `target`'s, its policy's configuration.

    The mask is a token that ends the target's texts, or padding: its embedding stays as the policy has it.
    """
    from speculators import SpeculatorsConfig, VerifierConfig
    from speculators.models.dflash import DFlashSpeculatorConfig
    from speculators.models.dspark import DSparkSpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import Qwen3Config

    layers = Qwen3Config(
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=target.intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=target.num_attention_heads,
        num_key_value_heads=target.num_key_value_heads,
        head_dim=getattr(target, "head_dim", None) or target.hidden_size // target.num_attention_heads,
        max_position_embeddings=target.max_position_embeddings,
        rms_norm_eps=target.rms_norm_eps,
        rope_parameters=dict(target.rope_parameters),
        tie_word_embeddings=False,
    )
    layers._attn_implementation = "sdpa"
    own: dict[str, Any] = {"markov_rank": 64, "enable_confidence_head": False, "confidence_head_with_markov": False}
    config, own = (DSparkSpeculatorConfig, own) if kind == "dspark" else (DFlashSpeculatorConfig, {})
    return config(
        transformer_layer_config=layers,
        draft_vocab_size=target.vocab_size,
        block_size=block_size,
        aux_hidden_state_layer_ids=list(choose_layer_ids(target.num_hidden_layers)),
        mask_token_id=target.pad_token_id if target.eos_token_id is None else target.eos_token_id,
        sample_from_anchor=False,
        sliding_window_non_causal=True,  # by which vLLM lets the rows of a block see each other in every layer
        speculators_config=SpeculatorsConfig(
            algorithm=kind,
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=block_size - 1)],
            default_proposal_method="greedy",
            verifier=VerifierConfig.from_pretrained(policy),
        ),
        **own,
    )


def make_head(kind: str, policy: str, num_layers: int, block_size: int, seed: int) -> Any:
    """Return a head of random float32 weights with its policy's embedding, norm and output head."""
    from speculators.models.dflash import DFlashDraftModel
    from speculators.models.dspark import DSparkDraftModel
    from transformers import AutoConfig

    torch.manual_seed(seed)
    config = head_config(kind, policy, AutoConfig.from_pretrained(policy), num_layers, block_size)
    head = (DSparkDraftModel if kind == "dspark" else DFlashDraftModel)(config)
    head.load_verifier_weights()
    return head


def pack_of(texts: Sequence[PolicyText], block_size: int, device: torch.device) -> dict[str, Tensor]:
    """Lay texts end to end, with padding behind each so that no block reaches into the next."""
    parts: dict[str, list[Tensor]] = {}
    for number, text in enumerate(texts):
        length, mask = len(text), torch.arange(len(text)) >= text.prompt_length
        tensors = {
            "hidden_states": text.states.float(),
            "verifier_last_hidden_states": text.last_states.float(),
            "input_ids": text.input_ids,
            "loss_mask": mask,
            "document_ids": torch.full((length,), number),
            "position_ids": torch.arange(length),
        }
        for name, tensor in tensors.items():
            edges = (0, 0) * (tensor.dim() - 1) + (0, block_size)
            filling = -1 if name == "document_ids" else 0
            parts.setdefault(name, []).append(pad(tensor, edges, value=filling))
    return {name: torch.cat(each)[None].to(device) for name, each in parts.items()}


def packs_of(texts: Sequence[PolicyText], num_tokens: int) -> Iterator[list[PolicyText]]:
    """Deal texts, in their order, into packs of at least `num_tokens`."""
    pack: list[PolicyText] = []
    for text in texts:
        pack.append(text)
        if sum(map(len, pack)) >= num_tokens:
            yield pack
            pack = []


def logits_of(head: Any, batch: dict[str, Tensor], num_anchors: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits of the head and of its target, and the places in the pack that they are of.

    Blocks begin at `num_anchors` random places of `loss_mask`. (num_anchors, block, V) twice, (num_anchors, block)
    """
    hidden, logits, targets, _, places = head._backbone_forward(**batch, max_anchors=num_anchors)
    if getattr(head, "markov_head", None) is not None:
        before = batch["input_ids"][0, places].view(num_anchors, -1)[:, :-1]
        before = pad(before, (1, 0))  # no draft is read from the anchor's row
        logits = logits.view(num_anchors, head.block_size, -1) + head.markov_head.block_bias(
            prev_token_ids=before, hidden_states=hidden.view(num_anchors, head.block_size, -1)
        )
    shape = num_anchors, head.block_size
    return logits.view(*shape, -1), targets.view(*shape, -1), places.view(shape)


def loss_of(head: Any, batch: dict[str, Tensor], num_anchors: int) -> Tensor:
    """Return the loss that `speculators` trains such heads with."""
    from speculators.losses import resolve_loss_config

    kernels = "fused" if batch["input_ids"].is_cuda else "eager"
    terms = {name: resolve_loss_config(name, kernels) for name in ("kl_div", "tv")}
    given = {"loss_config": terms["kl_div"], "tv_loss_fn": terms["tv"]["tv"][0], "gamma": GAMMA}
    if getattr(head, "markov_head", None) is None:
        del given["tv_loss_fn"]  # DSpark reports it
    with torch.compiler.set_stance("force_eager"):  # each pack has a length of its own
        loss: Tensor = head(**batch, max_anchors=num_anchors, **given)[1]
    return loss


@torch.no_grad()
@torch.compiler.set_stance("force_eager")  # each text has a length of its own
def measure(head: Any, texts: Sequence[PolicyText], rules: Sequence[AcceptanceRule], device: torch.device) -> Tensor:
    """Return, for each rule, the share of engine steps expected to accept the k-th draft and all before it: (rules, K).

    As `DraftQuality.accepted` of an EAGLE-3 head on the same texts.
    """
    num_drafts = head.block_size - 1
    sums = torch.zeros(len(rules), 2, num_drafts, dtype=torch.float64)
    for text in texts:
        anchors = torch.arange(text.prompt_length, len(text) - 1)
        if not len(anchors):
            continue
        batch = pack_of([text], head.block_size, device)
        found = torch.zeros(len(rules), 2, num_drafts, len(anchors))
        for places in torch.arange(len(anchors)).split(ROWS_AT_ONCE // head.block_size):
            mask = torch.zeros_like(batch["loss_mask"])
            mask[0, anchors[places].to(device)] = True
            logits, targets, block = logits_of(head, batch | {"loss_mask": mask}, len(places))
            written = batch["input_ids"][0, block][:, 1:].flatten()
            drafts, theirs = (each[:, 1:].flatten(0, 1).float() for each in (logits, targets))
            for rule, its in zip(rules, found, strict=True):
                judged = rule.judge(drafts, theirs, written)
                its[:, :, places] = torch.stack([each.view(-1, num_drafts).T for each in judged]).cpu()
        whole = torch.ones(len(anchors), dtype=torch.bool)
        for its, total in zip(found, sums, strict=True):
            total += expect_acceptance(its[0], its[1], [len(anchors)], whole).sum(0)
    return sums[:, 0] / sums[:, 1].clamp(min=1)
