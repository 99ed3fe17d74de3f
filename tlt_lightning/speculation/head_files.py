"""Read draft heads on disk, and check that a head fits the policy."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_LAYER = (
    *(f"self_attn.{part}_proj" for part in "qkvo"),
    *(f"mlp.{part}_proj" for part in ("gate", "up", "down")),
    *("input_layernorm", "post_attention_layernorm"),
)


@dataclass(frozen=True, slots=True)
class HeadKind:
    """Describes the files of a kind of head.

    vLLM starts with random weights, in silence, where files lack some.

    Args:
        name: Its name in messages.
        method: vLLM's name of it, and a part of that of its class.
        layer: Weights of each layer.
        others: Weights beside the layers.
        layer_ids: Where `speculators` keeps the layers of the policy that it reads.
        needs_v2: Whether vLLM's V2 runner alone serves it, which needs a GPU.
    """

    name: str
    method: str
    layer: tuple[str, ...]
    others: tuple[str, ...]
    layer_ids: str
    needs_v2: bool = False

    def parts(self, num_layers: int) -> tuple[str, ...]:
        """Return the layers whose weights every such head has in its files."""
        return (*(f"layers.{index}.{part}" for index in range(num_layers) for part in self.layer), *self.others)


EAGLE3 = HeadKind("EAGLE-3", "eagle3", (*_LAYER, "hidden_norm"), ("norm", "fc"), "eagle_aux_hidden_state_layer_ids")
DSPARK = HeadKind(
    "DSpark",
    "dspark",
    (*_LAYER, "self_attn.q_norm", "self_attn.k_norm"),
    ("norm", "fc", "hidden_norm", "markov_head.markov_w1", "markov_head.markov_w2"),
    "aux_hidden_state_layer_ids",
    needs_v2=True,
)


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Describes a head saved at `path`, and the policy that it expects.

    Args:
        kind: Kind of head.
        num_layers: Its own layers.
        most_drafts: Tokens that it drafts in a pass, and at most; None for one a pass, and any number.
        vocab_size: Size of the vocabulary that the head reads.
        draft_vocab_size: Size of the vocabulary that the head writes; the same, or smaller with a map back.
        target_hidden_size: Width of the hidden states that the head reads.
        layer_ids: Layers of the policy whose outputs the head reads; empty if left to vLLM.
        tensors: Shapes of the saved tensors, by name.
    """

    path: str
    kind: HeadKind
    num_layers: int
    most_drafts: int | None
    vocab_size: int
    draft_vocab_size: int
    target_hidden_size: int
    layer_ids: tuple[int, ...]
    tensors: Mapping[str, tuple[int, ...]]


def read_head(path: str) -> HeadShape:
    """Read the head at `path`, in the format of vLLM or `speculators`, or raise ValueError."""
    config_path = Path(path) / "config.json"
    if not config_path.is_file():
        raise ValueError(f"`head` {path!r} has no config.json; give the directory of a draft head.")
    with _readable(path):
        config = json.loads(config_path.read_text())
        architectures = config.get("architectures") or []
    kinds = [kind for kind in (EAGLE3, DSPARK) if any(kind.method in name.lower() for name in architectures)]
    if not kinds:
        raise ValueError(
            f"`head` {path!r} holds {architectures}, neither an EAGLE-3 head (LlamaForCausalLMEagle3, or "
            "Eagle3DraftModel as `speculators` saves it) nor its DSparkDraftModel."
        )
    with _readable(path):
        layer = config.get("transformer_layer_config", config)  # `speculators` nests the Llama part
        vocab_size = int(layer["vocab_size"])
        nested = config.get("eagle_config") or {}
        named = config.get(kinds[0].layer_ids)
        layer_ids = named or nested.get("eagle_aux_hidden_state_layer_ids") or ()
        block_size = config.get("block_size")
        return HeadShape(
            path=path,
            kind=kinds[0],
            num_layers=int(layer.get("num_hidden_layers", 1)),
            most_drafts=block_size and block_size - (not config.get("sample_from_anchor")),
            vocab_size=vocab_size,
            draft_vocab_size=int(config.get("draft_vocab_size") or vocab_size),
            target_hidden_size=int(config.get("target_hidden_size") or layer["hidden_size"]),
            layer_ids=tuple(int(index) for index in layer_ids),
            tensors=_tensor_shapes(path),
        )


@contextmanager
def _readable(path: str) -> Iterator[None]:
    """Raise ValueError for whatever readers of JSON and of weights raise at files that are cut short or others."""
    try:
        yield
    except Exception as error:
        reason = str(error).partition(".")[0]  # torch goes on to advise reading the file without any check
        raise ValueError(
            f"`head` {path!r} cannot be read: its config.json or its weights are broken "
            f"({type(error).__name__}: {reason}). Copy or download it again."
        ) from error


def check_head(head: HeadShape, policy: str) -> None:
    """Raise ValueError, naming both, unless the head can draft for the policy."""
    from transformers import AutoConfig

    config: Any = AutoConfig.from_pretrained(policy).get_text_config()
    faults = []
    if head.vocab_size != config.vocab_size:
        faults.append(f"vocabulary of {head.vocab_size} tokens against {config.vocab_size}")
    if head.target_hidden_size != config.hidden_size:
        faults.append(f"hidden states of width {head.target_hidden_size} against {config.hidden_size}")
    if head.draft_vocab_size > head.vocab_size:
        faults.append(f"draft vocabulary of {head.draft_vocab_size} tokens, more than the {head.vocab_size} there are")
    if not head.tensors:
        faults.append("no weights in *.safetensors or pytorch_model*.bin")
    elif head.draft_vocab_size < head.vocab_size and "d2t" not in head.tensors:
        faults.append(f"draft vocabulary of {head.draft_vocab_size} tokens without `d2t`, the map back to tokens")
    elif missing := sorted(
        {f"{part}.weight" for part in head.kind.parts(head.num_layers)} - set(map(canonical_name, head.tensors))
    ):
        faults.append(f"its files lack {', '.join(missing)}")
    elif broken := _not_finite(head.path):
        faults.append(f"its files hold NaN or infinite numbers, in {', '.join(broken)}")
    if biases := sorted(name for name in head.tensors if name.endswith(".bias")):
        faults.append(f"biases, which `update_drafter` does not know: {', '.join(biases)}")
    layers = config.num_hidden_layers
    wanted = head.layer_ids or default_layer_ids(layers)
    if any(not 0 <= index <= layers for index in wanted) or len(set(wanted)) != len(wanted):
        faults.append(f"reads layers {list(wanted)}, of which the policy has {layers} (ids must be distinct)")
    if faults:
        raise ValueError(
            f"`head` {head.path!r} does not fit policy {policy!r}: {'; '.join(faults)}. Use the head "
            "trained for this policy, or train one."
        )


def canonical_name(name: str) -> str:
    """Return the name in `speculators` of a tensor that others call `midlayer.*` or `model.*`."""
    return name.removeprefix("model.").replace("midlayer.", "layers.0.")


def default_layer_ids(num_layers: int) -> tuple[int, int, int]:
    """Return the layers that vLLM takes for an EAGLE-3 head that names none."""
    return (2, num_layers // 2, num_layers - 3)


def weight_files(path: str) -> list[Path]:
    """Return the files with the weights of the head at `path`: those of safetensors, else PyTorch's."""
    return sorted(Path(path).glob("*.safetensors")) or sorted(Path(path).glob("pytorch_model*.bin"))


def load_weights(file: Path, device: str = "cpu") -> dict[str, Any]:
    """Load a file of `weight_files`, tensors by name; nothing else of a pickled file is run."""
    import torch
    from safetensors.torch import load_file

    is_safe = file.suffix == ".safetensors"
    tensors: dict[str, Any] = load_file(file, device) if is_safe else torch.load(file, device, weights_only=True)
    return tensors


def _not_finite(path: str) -> list[str]:
    """Return the names of tensors that hold NaN or infinite numbers."""
    tensors = (pair for file in weight_files(path) for pair in load_weights(file).items())
    return sorted(name for name, tensor in tensors if not tensor.isfinite().all())


def _tensor_shapes(path: str) -> dict[str, tuple[int, ...]]:
    from safetensors import safe_open

    shapes: dict[str, tuple[int, ...]] = {}
    for file in weight_files(path):
        if file.suffix == ".bin":
            shapes |= {name: tuple(tensor.shape) for name, tensor in load_weights(file, "meta").items()}
            continue
        with safe_open(file, framework="pt") as tensors:
            shapes.update({name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()})  # noqa: SIM118
    return shapes
