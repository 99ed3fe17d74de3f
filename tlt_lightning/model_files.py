"""Load Hugging Face models whole: every weight from their files, none at random values."""

from __future__ import annotations

import os
import zlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

HOW_TO_SAVE = (
    "Save model and tokenizer into one folder with `save_pretrained`, a model of PEFT after `merge_and_unload()`: "
    "its own folder would hold the adapter alone."
)


_SAMPLES, _SAMPLE_BYTES = 64, 2**14


def checksum_of_weights(path: str) -> int:
    """Return a number that tells the weights at `path` from others, by the sizes of their files and samples of each."""
    from transformers.utils import cached_file

    number, folder = 0, Path(str(cached_file(path, "config.json"))).parent
    for each in sorted([*folder.glob("model*.safetensors")] or [*folder.glob("pytorch_model*.bin")]):
        size = each.stat().st_size
        number = zlib.crc32(repr(size).encode(), number)
        with open(each, "rb") as file:
            for sample in range(_SAMPLES):
                file.seek(size * sample // _SAMPLES)
                number = zlib.crc32(file.read(_SAMPLE_BYTES), number)
    return number


def read_config(path: str, argument: str = "policy") -> PretrainedConfig:
    """Read the config of the model at `path`.

    Raises:
        ValueError: transformers finds none, or an adapter beside it, which it would add to the weights. The message
            names the `argument` that holds `path`.
    """
    from transformers import AutoConfig
    from transformers.utils import find_adapter_config_file

    try:
        adapter = find_adapter_config_file(path)
        if adapter is None:
            return AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        offline = " (`HF_HUB_OFFLINE` is set)" if os.environ.get("HF_HUB_OFFLINE") else ""
        raise ValueError(
            f"`{argument}` {path!r} is no folder that `save_pretrained` wrote, looked for from {Path.cwd()}, and the "
            f"hub gave no such model{offline}: {str(error).splitlines()[0]}"
        ) from error
    raise ValueError(
        f"`{argument}` {path!r} holds an adapter, {Path(adapter).name}, which transformers would add to the weights "
        f"beside it, merged or not. Remove that file if they are merged. {HOW_TO_SAVE}"
    )


def load_whole(
    auto_class: Any, path: str, argument: str, *, needs_head: bool = True, may_hold_more: bool = False, **options: Any
) -> PreTrainedModel:
    """Load a model whose every weight comes from its files, where transformers would start some at random values.

    Args:
        auto_class: transformers' class for it, such as `AutoModelForCausalLM`.
        path: Folder or hub name.
        argument: Name of the user's argument that holds `path`, for messages.
        needs_head: Its head is used, too, not the trunk alone.
        may_hold_more: The files may hold other weights besides.
        **options: Passed on to `from_pretrained`.

    Raises:
        ValueError: A weight is missing, unknown or of another shape, or a file is cut off.
    """
    from safetensors import SafetensorError

    read_config(path, argument)
    try:
        model, info = auto_class.from_pretrained(
            path, output_loading_info=True, ignore_mismatched_sizes=True, **options
        )
    except SafetensorError:
        check_files(path, {}, argument)
        raise
    prefix = "" if needs_head else f"{model.base_model_prefix}."
    faults = {
        "lack": {name for name in info["missing_keys"] if name.startswith(prefix)},
        "hold in another shape": {name for name, *_ in info["mismatched_keys"]},
        "hold besides": set() if may_hold_more else info["unexpected_keys"],
    }
    found = [f"{fault} {_some(names)}" for fault, names in faults.items() if names]
    if found:
        raise ValueError(
            f"The files of `{argument}` {path!r} {' and '.join(found)}: they are not of the model that its config.json "
            "describes, and what they lack would start at random values. Save it again with `save_pretrained`."
        )
    return model


def _some(names: Collection[str]) -> str:
    return ", ".join(sorted(names)[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def check_files(path: str, shapes: Mapping[str, tuple[int, ...]], argument: str = "policy") -> None:
    """Raise ValueError if a safetensors file of a folder is cut off, or holds a tensor in another shape."""
    from safetensors import SafetensorError, safe_open

    for each in sorted(Path(path).glob("*.safetensors")):
        try:
            with safe_open(each, "pt") as file:
                held = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise ValueError(
                f"`{argument}` {path!r}: {each.name} cannot be read ({error}). Copy or download it again."
            ) from error
        for name in sorted(held.keys() & shapes.keys()):
            if held[name] != tuple(shapes[name]):
                raise ValueError(
                    f"`{argument}` {path!r}: its config.json makes {name!r} {tuple(shapes[name])}, but {each.name} "
                    f"holds {held[name]}; config and weights are not of one model."
                )
