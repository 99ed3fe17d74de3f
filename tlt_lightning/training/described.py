"""Describe arguments by primitives, as a recipe would write them, for loggers and checkpoints."""

import functools
import inspect
from collections.abc import Mapping
from dataclasses import Field, fields, is_dataclass
from pathlib import Path
from typing import Any

import lightning as L
from torch import Tensor, nn

INSTANTIATOR = "lightning.pytorch.cli.instantiate_module"
"""Names the function by which `load_from_checkpoint` makes objects of their descriptions again."""


def keep_arguments(module: L.LightningModule | L.LightningDataModule, arguments: Mapping[str, Any]) -> None:
    """Save a constructor's arguments, its `locals()`, as hyper-parameters of primitives."""
    module.save_hyperparameters(
        {name: describe(value) for name, value in arguments.items() if name not in ("self", "__class__")}
    )


def describe(value: Any) -> Any:
    """Return `value` as primitives.

    Functions and classes become dotted paths, objects `class_path` and `init_args`, dataclasses without a parent their
    fields. A field that is left out of `repr`, and what cannot be written, become a few words.

    Example:
        >>> from tlt_lightning.adapters import LoRA
        >>> describe([LoRA(rank=4), functools.partial(LoRA, rank=8)])[1]
        {'class_path': 'tlt_lightning.adapters.LoRA', 'init_args': {'rank': 8}}
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): describe(item) for key, item in value.items()}
    if isinstance(value, Tensor):  # such as a learning rate
        return value.tolist()
    if isinstance(value, list | tuple):
        return [describe(item) for item in value]
    if isinstance(value, functools.partial):
        *_, made = (part for part in (value.func, *value.args) if callable(part))
        return (
            {"class_path": describe(made), "init_args": describe(value.keywords)} if value.keywords else describe(made)
        )
    if inspect.isroutine(value) or inspect.isclass(value):
        return f"{value.__module__}.{value.__qualname__}"
    if is_dataclass(value) and type(value).__bases__ == (object,):
        return {item.name: _describe_field(item, getattr(value, item.name)) for item in fields(value)}
    return str(value) if isinstance(value, Path | nn.Module) else describe_object(value, vars(value))


def describe_object(value: object, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the class of an object and those of its settings that its constructor takes."""
    kind = type(value)
    names = inspect.signature(kind).parameters
    return {
        "class_path": f"{kind.__module__}.{kind.__qualname__}",
        "init_args": {name: describe(settings[name]) for name in names if name in settings},
    }


def _describe_field(item: Field[Any], value: Any) -> Any:
    return describe(value) if item.repr or value is None else f"{type(value).__name__} of {len(value)}"
