"""Replace attributes for a while: parts of Lightning during a run, parts of vLLM during an engine's life."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any


def replace(undone: ExitStack, owner: Any, name: str, new: Any) -> None:
    """Replace an attribute of an object, a class or a module until `undone` is closed."""
    if name in vars(owner):
        undone.callback(setattr, owner, name, vars(owner)[name])
    else:
        undone.callback(delattr, owner, name)
    setattr(owner, name, new)
