"""Build or load a head, a model of `speculators`, and tie it to its target's weights."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import torch
from torch import Tensor, nn

from tlt_lightning.arguments import Bound, check_argument, text_of
from tlt_lightning.drafter.architectures.base import DraftArchitecture, Head, HeadSettings
from tlt_lightning.drafter.architectures.dspark import DSpark
from tlt_lightning.drafter.architectures.eagle3 import Eagle3
from tlt_lightning.drafter.target import TargetWeights, choose_layer_ids, is_valid
from tlt_lightning.drafter.vocabulary import drafted_tokens
from tlt_lightning.speculation.head_files import (
    canonical_name,
    check_head,
    default_layer_ids,
    load_weights,
    read_head,
    weight_files,
)

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_NUM_DRAFT_TOKENS = 3
_LARGE, _DRAFTED = 64_000, 32_000  # tokens of a target, and of a new head for a larger one, as published heads have
_BY_METHOD: dict[str, type[DraftArchitecture]] = {"eagle3": Eagle3, "dspark": DSpark}  # vLLM's names
_TARGETS_OWN = ("embed_tokens.", "lm_head.", "verifier_lm_head.", "verifier_norm.")
_OWN_OUTPUT = 0.5  # relative distance: a policy's rows move by far less in any training, a head of its own is elsewhere


def check_library() -> None:
    """Raise ImportError unless `speculators`, whose model a head is, is there."""
    if find_spec("speculators") is None:
        raise ImportError("`DrafterModule` needs the package `speculators`: pip install 'tlt-lightning[eagle3]'.")


def architecture_of(head: str) -> DraftArchitecture:
    """Return the architecture of the head in the directory `head`, or raise ValueError."""
    saved = read_head(head)
    architecture = _BY_METHOD[saved.kind.method]()
    architecture.most_drafts = saved.most_drafts
    return architecture


def choose_settings(
    architecture: DraftArchitecture,
    target: str,
    config: PretrainedConfig,
    head: str | None,
    layer_ids: tuple[int, ...] | None,
    draft_vocab_size: int | None,
    num_draft_tokens: int | None,
) -> HeadSettings:
    """Choose the settings of the head in the directory `head`, or if it is None, of a new one.

    `config` is the target's. Those of the last three that are None are chosen here. ValueError means that the
    settings do not fit the target or the saved head.
    """
    num_layers, vocab_size = config.num_hidden_layers, config.vocab_size
    most = architecture.most_drafts
    num_draft_tokens = most or _NUM_DRAFT_TOKENS if num_draft_tokens is None else num_draft_tokens
    check_argument("num_draft_tokens", num_draft_tokens, Annotated[int, Bound(1, most or inf)])
    remedy = "The target has no more tokens."
    check_argument("draft_vocab_size", draft_vocab_size, Annotated[int | None, Bound(1, vocab_size), remedy])
    check_argument("layer_ids", layer_ids, Sequence[int] | None)
    if head is None:
        layer_ids = choose_layer_ids(num_layers) if layer_ids is None else tuple(layer_ids)
        draft_vocab_size = draft_vocab_size or (_DRAFTED if vocab_size > _LARGE else vocab_size)
    else:
        layer_ids, draft_vocab_size = _saved_shape(head, target, num_layers, layer_ids, draft_vocab_size)
    if not is_valid(layer_ids, num_layers):
        raise ValueError(
            f"`layer_ids` must be three of 0 to {num_layers}, the target's layers, ascending; got {layer_ids}."
        )
    return HeadSettings(target, layer_ids, draft_vocab_size, num_draft_tokens)


def _saved_shape(
    head: str, target: str, num_layers: int, layer_ids: tuple[int, ...] | None, draft_vocab_size: int | None
) -> tuple[tuple[int, ...], int]:
    shape = read_head(head)
    check_head(shape, target)
    its_layers = shape.layer_ids or default_layer_ids(num_layers)
    asked = {"layer_ids": layer_ids and tuple(layer_ids), "draft_vocab_size": draft_vocab_size}
    for name, its in (("layer_ids", its_layers), ("draft_vocab_size", shape.draft_vocab_size)):
        if asked[name] not in (None, its):
            raise ValueError(f"`{name}` is {asked[name]}, but `head` was made with {its}; leave it out.")
    return its_layers, shape.draft_vocab_size


def build_head(architecture: DraftArchitecture, settings: HeadSettings, config: PretrainedConfig, seed: int) -> Head:
    """Build a head of random float32 weights, the same on each rank, without the target's parts."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return architecture.build(settings, config)


def load_head(architecture: DraftArchitecture, path: str, settings: HeadSettings) -> Head:
    """Load the head at `path`, in vLLM's format or that of `speculators`, as float32.

    ValueError means that it is of a kind that is not trained here, or holds other weights than its configuration says.
    """
    from transformers.initialization import no_init_weights

    with no_init_weights():  # all are read below or from the target; random ones take seconds at 7B
        head = architecture.restore(path, json.loads((Path(path) / "config.json").read_text()), settings)
    nn.init.constant_(head.lm_head.weight, torch.nan)  # by which `attach_target` knows that the file has none
    tensors: dict[str, Tensor] = {}
    for file in weight_files(path):
        tensors.update({canonical_name(name): tensor for name, tensor in load_weights(file).items()})
    # The embedding is the target's; the output head is filled in from the target where it is not in the file.
    own = {name: tensor for name, tensor in tensors.items() if not name.startswith(("embed_tokens.", "verifier_"))}
    if head.use_draft_vocab and "t2d" not in own:
        own["t2d"] = torch.zeros(head.verifier_vocab_size, dtype=torch.bool)
        own["t2d"][drafted_tokens(own["d2t"])] = True
    try:
        unknown = head.load_state_dict(own, strict=False).unexpected_keys
    except RuntimeError as error:  # of other shapes
        unknown = [" ".join(str(error).split())]
    if unknown:
        raise ValueError(
            f"`head` {path!r} does not hold the weights that its config.json speaks of, but others: "
            f"{', '.join(unknown)}."
        )
    return head


def find_head(head: str) -> str:
    """Return the directory of the head at path or hub name `head`, or raise ValueError."""
    head = text_of("head", head, "Give a folder or hub name, or leave it out.")
    if Path(head).is_dir():
        return head
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(head, allow_patterns=["*.json", "*.safetensors"])
        return folder if weight_files(folder) else snapshot_download(head, allow_patterns=["*.json", "*.bin"])
    except (OSError, ValueError) as error:  # no such name, no network, or not the form of a name
        raise ValueError(
            f"`head` {head!r} is neither a directory nor a head on the hub ({type(error).__name__}). Leave it out to "
            "start from random weights."
        ) from error


def attach_target(head: Head, weights: TargetWeights) -> bool:
    """Give the head its target's frozen tensors, shared where the target shares them.

    Return True if the head drafts with the target's output head or rows of it; False if it keeps one of its own.
    """
    rows = _rows(head, weights)
    loaded = head.lm_head.weight.detach()
    distance = (loaded - rows).norm() / rows.norm()  # not a number if none was loaded
    follows = not bool(distance > _OWN_OUTPUT)
    head.config.dtype = weights.embedding.dtype  # in which it is exported, whatever type it computes in
    head.embed_tokens.weight = _frozen(weights.embedding)
    head.verifier_norm.weight = _frozen(weights.norm)
    tied = rows.data_ptr() == weights.embedding.data_ptr()
    head.verifier_lm_head.weight = head.embed_tokens.weight if tied else _frozen(rows)
    head.lm_head.weight = head.verifier_lm_head.weight if follows else _frozen(loaded.to(rows.dtype))
    for name, parameter in head.named_parameters():
        parameter.requires_grad_(not name.startswith(_TARGETS_OWN))
    return follows


@torch.no_grad()
def refresh_target(head: Head, weights: TargetWeights) -> None:
    """Copy the target's current tensors into those the head was given."""
    rows = _rows(head, weights)
    head.embed_tokens.weight.copy_(weights.embedding)
    head.verifier_norm.weight.copy_(weights.norm)
    if head.verifier_lm_head.weight is not head.embed_tokens.weight:
        head.verifier_lm_head.weight.copy_(rows)


def _rows(head: Head, weights: TargetWeights) -> Tensor:
    """Return the rows of the target's output head that the head drafts with."""
    output = weights.output
    return output if head.d2t is None else output[drafted_tokens(head.d2t).to(output.device)]


def trainable(head: Head) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the trained parameters under the names that checkpoints and engines use."""
    return ((name, parameter) for name, parameter in head.named_parameters() if parameter.requires_grad)


def _frozen(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor.contiguous(), requires_grad=False)
