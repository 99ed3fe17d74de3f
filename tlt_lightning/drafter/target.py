"""Read what a drafter takes from its target: shape, layers, embedding, norm, output head."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tlt_lightning.adapters import computed_weight
from tlt_lightning.engine.architectures import ARCHITECTURES
from tlt_lightning.model_files import read_config
from tlt_lightning.policy import causal_lm
from tlt_lightning.sharding.units import gathered, is_sharded
from tlt_lightning.speculation.head_files import default_layer_ids

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_FAMILIES = [each.model_type for each in ARCHITECTURES if each.has_drafter]
_EMBEDDING, _NORM, _HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


@dataclass(slots=True)
class TargetWeights:
    """Holds the target's tensors that a drafter reads and never trains.

    `embedding` and `output`, its output head, are (V, H) and one tensor where tied; `norm` is the final norm's. (H,)
    """

    embedding: Tensor
    norm: Tensor
    output: Tensor


def frozen_dtype(device: torch.device, *, is_mixed: bool) -> torch.dtype | None:
    """Return the type that a target's frozen weights are held in, and products with them run in; None is their files'.

    Without autocast a CPU computes in float32: in bfloat16 a product takes 18 times as long where it has no AVX-512.
    """
    return torch.float32 if device.type == "cpu" and not is_mixed else None


def read_target(path: str) -> PretrainedConfig:
    """Read the target's configuration; raise ValueError if there is none, or no head can draft for it."""
    config = read_config(path, "target")
    if config.model_type not in _FAMILIES:
        raise ValueError(
            f"`target` {path!r} is a {config.model_type} model; draft heads are for {', '.join(_FAMILIES)}. "
            "Leave `adaptive_drafter.yaml` out; `speculation.yaml` drafts without a head."
        )
    return config


def choose_layer_ids(num_layers: int) -> tuple[int, int, int]:
    """Choose a new head's layers: vLLM's, or a tiny target's; ValueError below two layers."""
    spread = (1, num_layers // 2, num_layers - 1)
    last = (num_layers - 2, num_layers - 1, num_layers)
    for layer_ids in (default_layer_ids(num_layers), spread, last):
        if is_valid(layer_ids, num_layers):
            return layer_ids
    raise ValueError(f"A target of {num_layers} layers has no three hidden states to read; it needs at least 2 layers.")


def is_valid(layer_ids: tuple[int, ...], num_layers: int) -> bool:
    """Return True if `layer_ids` are three of the target's layers, in ascending order."""
    is_ascending = all(low < high for low, high in pairwise(layer_ids))
    return len(layer_ids) == 3 and is_ascending and layer_ids[0] >= 0 and layer_ids[-1] <= num_layers


def read_weights(path: str, config: PretrainedConfig) -> TargetWeights:
    """Read the target's frozen tensors from its checkpoint in their type, or raise ValueError."""
    from loguru import logger
    from speculators.utils.loading import load_model_layers

    logger.disable("speculators")  # it reports every file on stderr
    names = [_EMBEDDING, _NORM] if config.tie_word_embeddings else [_EMBEDDING, _NORM, _HEAD]
    tensors = load_model_layers(names, path)
    if missing := sorted(set(names) - set(tensors)):
        raise ValueError(f"`target` {path!r} lacks {', '.join(missing)} in its safetensors files.")
    return TargetWeights(tensors[_EMBEDDING], tensors[_NORM], tensors.get(_HEAD, tensors[_EMBEDDING]))


def live_weights(policy: nn.Module) -> TargetWeights:
    """Return the live policy's own tensors, adapters merged, or copies if it is sharded; never write to them."""
    model: Any = causal_lm(policy)
    modules = (model.get_input_embeddings(), model.base_model.norm, model.get_output_embeddings())
    with gathered(model):
        tensors = [computed_weight(module) for module in modules]
        return TargetWeights(*([tensor.clone() for tensor in tensors] if is_sharded(model) else tensors))
