"""EAGLE-3 heads (Li et al., 2025, arXiv 2503.01840): one layer, which drafts one token a pass."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor
from typing_extensions import override

from tlt_lightning.drafter import chunked_loss
from tlt_lightning.drafter.architectures.base import (
    DraftArchitecture,
    Drafting,
    Head,
    HeadSettings,
    layer_settings,
    speculation_of,
)
from tlt_lightning.drafter.architectures.document_attention import attend_in_documents
from tlt_lightning.drafter.architectures.training_time_test import unroll
from tlt_lightning.drafter.chunked_loss import Predictions
from tlt_lightning.drafter.packing import PackedBatch
from tlt_lightning.fused.layers import fuse_layers

if TYPE_CHECKING:
    from speculators.models.eagle3 import Eagle3DraftModel
    from transformers import PretrainedConfig

_ATTENTION = "tlt_documents"
_UNSUPPORTED = ("norm_before_fc", "fc_norm", "norm_output")


class Eagle3(DraftArchitecture):
    """Drafts each token from the head's own features of the one before, and learns so (training-time test)."""

    @override
    def build(self, settings: HeadSettings, target: PretrainedConfig) -> Eagle3DraftModel:
        return _empty_head(settings, _layer_config(target), norm_before_residual=False)

    @override
    def restore(self, path: str, config: dict[str, Any], settings: HeadSettings) -> Eagle3DraftModel:
        from transformers import AutoConfig

        if found := [name for name in _UNSUPPORTED if config.get(name)]:
            raise ValueError(f"`head` {path!r} was made with {', '.join(found)}, which is not supported here.")
        layer = dict(config.get("transformer_layer_config") or config)
        if layer.get("num_hidden_layers", 1) != 1:
            raise ValueError(
                f"`head` {path!r} has {layer['num_hidden_layers']} layers; heads of one layer are supported."
            )
        layer_config = AutoConfig.for_model(layer.pop("model_type"), **layer)
        return _empty_head(settings, layer_config, norm_before_residual=bool(config.get("norm_before_residual")))

    @override
    def predict(self, head: Head, batch: PackedBatch, wanted: Drafting) -> tuple[Predictions, Tensor]:
        features = unroll(head, batch, len(wanted.weights))
        given = wanted.terms, wanted.weights, wanted.judge
        return chunked_loss.predict(head, features, batch.last_states[0], *given, compares=wanted.compares)


def _layer_config(target: PretrainedConfig) -> Any:
    """Configure a Llama layer of the target's widths, which vLLM runs for every family."""
    from transformers import LlamaConfig

    own = {name: getattr(target, name) for name in ("hidden_act", "bos_token_id", "eos_token_id")}
    return LlamaConfig(num_hidden_layers=1, **layer_settings(target), **own)


def _empty_head(settings: HeadSettings, layer_config: Any, norm_before_residual: bool) -> Eagle3DraftModel:
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
    from transformers import AttentionInterface

    AttentionInterface.register(_ATTENTION, attend_in_documents)
    layer_config._attn_implementation = _ATTENTION
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer_config,
        draft_vocab_size=settings.draft_vocab_size,
        norm_before_residual=norm_before_residual,
        eagle_aux_hidden_state_layer_ids=list(settings.layer_ids),
        speculators_config=speculation_of("eagle3", settings),
    )
    head = Eagle3DraftModel(config)
    fuse_layers(head)
    return head
