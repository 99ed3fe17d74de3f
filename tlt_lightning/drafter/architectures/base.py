"""Say what a draft head is: its network, and how it drafts the texts of a pack."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from tlt_lightning.drafter.chunked_loss import LossTerms, Predictions
from tlt_lightning.drafter.packing import PackedBatch
from tlt_lightning.engine.architectures import head_size

if TYPE_CHECKING:
    from speculators import SpeculatorsConfig
    from transformers import PretrainedConfig

Head = Any
"""A model of `speculators`: the network of an architecture, with its target's embedding, norm and output head."""

Judge = Callable[[int, Any, Tensor, Tensor], None]
"""Takes a drafted token's number, an index of the entries it is drafted from, and the logits of head and target."""


@dataclass(frozen=True, slots=True)
class HeadSettings:
    """Fixes the shape of a head.

    Args:
        target: Path or hub name of the target.
        layer_ids: Layers of the target that the head reads.
        draft_vocab_size: Tokens that the head can draft.
        num_draft_tokens: Draft length unless the engine is told otherwise.
    """

    target: str
    layer_ids: tuple[int, ...]
    draft_vocab_size: int
    num_draft_tokens: int


@dataclass(frozen=True, slots=True)
class Drafting:
    """Says what is drafted from a pack, and what is computed of it.

    Args:
        terms: Losses of `speculators` with their weights.
        weights: Weight of the loss of each drafted token of each entry. (K, T)
        rows: Entries of `sample`; None: all that count.
        judge: Is told the logits of what is drafted.
        compares: Tell how often the two agree, which takes time.
    """

    terms: LossTerms
    weights: Tensor
    rows: Tensor | None = None
    judge: Judge | None = None
    compares: bool = True


class DraftArchitecture(ABC):
    """Builds heads of one kind, and drafts with them. What vLLM is told of a kind follows from its saved heads."""

    most_drafts: int | None = None
    """Tokens that a head can draft in a step; None for any number."""
    decay = 1.0
    """Weight of a drafted token's loss relative to the one before, beside `Teaching.decay`."""
    learns_in_turn = True
    """True if a new head learns later tokens only once it drafts earlier ones well."""

    @abstractmethod
    def build(self, settings: HeadSettings, target: PretrainedConfig) -> Head:
        """Return a head of random float32 weights without its target's, made with torch's global random state."""

    @abstractmethod
    def restore(self, path: str, config: dict[str, Any], settings: HeadSettings) -> Head:
        """Return a head as the `config` of the one saved at `path` has it, whose weights are to be filled in."""

    def sample(self, batch: PackedBatch) -> Tensor | None:
        """Return the entries from which a training step drafts, (N,), others than those that count too; None: all."""
        return None

    @abstractmethod
    def predict(self, head: Head, batch: PackedBatch, wanted: Drafting) -> tuple[Predictions, Tensor]:
        """Draft from entries of a pack; return the comparison with the target, and the weighted sum of losses."""


def layer_settings(target: PretrainedConfig) -> dict[str, Any]:
    """Return the settings of a layer of the target's widths, as the configurations of `transformers` name them."""
    same = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    return {
        **{name: getattr(target, name) for name in (*same, "max_position_embeddings", "rms_norm_eps")},
        "head_dim": head_size(target),
        "rope_parameters": dict(target.rope_parameters),
        "tie_word_embeddings": False,
    }


def speculation_of(algorithm: str, settings: HeadSettings) -> SpeculatorsConfig:
    """Return what `speculators` notes of a head's target and draft length."""
    from speculators import SpeculatorsConfig, VerifierConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    return SpeculatorsConfig(
        algorithm=algorithm,
        proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=settings.num_draft_tokens)],
        default_proposal_method="greedy",
        verifier=VerifierConfig.from_pretrained(settings.target),
    )
