"""Check what holds for every plugin: that its methods can be called, and its state saved."""

from __future__ import annotations

import inspect
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

POLICY = str(Path(__file__).parents[1] / "recipes/assets/countdown/policy")
"""A policy of a million weights that comes with the package."""


def check_methods(plugin: object, kind: type | None = None) -> None:
    """Check that each method can be called as that of the abstract class, which is all there is to check of some.

    Args:
        plugin: An object of the author's class: a graph pool, say, or a budget.
        kind: The class that declares the methods; None takes the plugin's abstract base.
    """
    kind = kind or next(base for base in reversed(type(plugin).__mro__) if inspect.isabstract(base))
    for name, declared in inspect.getmembers(kind):
        is_public = not name.startswith("_") or name == "__call__"
        if is_public and inspect.isfunction(declared):
            check_method(plugin, name, declared)
        elif isinstance(declared, property):
            is_method = inspect.isfunction(getattr(type(plugin), name))
            assert not is_method, f"{named(plugin, name)} is a method, and is read as a value: add `@property`."


def check_method(plugin: object, name: str, declared: Callable[..., Any]) -> None:
    """Check that method `name` of `plugin` can be called with the arguments of `declared`."""
    method, who = getattr(plugin, name), named(plugin, name)
    assert callable(method), f"{who} is {method!r}: make it a method."
    is_async = inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(method)
    assert not is_async, f"{who} is async, and is called without `await`: drop `async`."
    _, *arguments = inspect.signature(declared).parameters.values()
    keywords = {each.name: None for each in arguments if each.kind is each.KEYWORD_ONLY}
    others = [each.name for each in arguments if each.name not in keywords]
    try:
        inspect.signature(method).bind(*others, **keywords)
    except TypeError as error:
        called_with = ", ".join([*others, *(f"{each}=..." for each in keywords)])
        raise AssertionError(f"{who} is called with ({called_with}): {error}.") from error
    except ValueError:
        return  # a builtin, whose signature Python does not know


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
