"""Name a plugin in messages, and save its state as a checkpoint does."""

import io
from pathlib import Path
from typing import Any

import torch

POLICY = str(Path(__file__).parents[1] / "recipes/assets/countdown/policy")
"""A policy of a million weights that comes with the package."""


def named(plugin: object, method: str) -> str:
    """Return the method's name for a message."""
    return f"`{type(plugin).__name__}.{method}`"


def shown(found: object) -> str:
    """Return what a method returned, in one line."""
    return " ".join(f"{found!r}".split())[:200]


def saved(plugin: Any) -> Any:
    """Return the plugin's state as it comes back out of a checkpoint."""
    file = io.BytesIO()
    torch.save(plugin.state_dict(), file)
    try:
        return torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    except Exception as error:
        who, what = named(plugin, "state_dict"), str(error).splitlines()[0]
        remedy = "return tensors, numbers, texts, lists and dictionaries"
        raise AssertionError(f"{who} returned what a checkpoint does not load: {remedy}. {what}") from error
