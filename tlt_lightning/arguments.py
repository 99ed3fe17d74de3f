"""Check arguments; errors name the argument, the value and what is allowed.

Pure Python: every room uses it, also `speculation/`, which imports neither torch nor vLLM.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from math import inf
from numbers import Integral, Real
from pathlib import Path
from typing import Any


def check_number(name: str, value: object) -> None:
    """Raise TypeError if argument `name` is no number; True is none."""
    if not isinstance(value, Real) or isinstance(value, bool):
        raise TypeError(f"`{name}` must be a number, got {value!r}.")


def check_at_least(name: str, value: float, minimum: float, remedy: str = "") -> None:
    """Raise ValueError if argument `name` is below `minimum` or NaN, TypeError if it is no number.

    `remedy` ends the message.
    """
    if not isinstance(value, Real) or isinstance(value, bool):
        raise TypeError(f"`{name}` must be a number of at least {minimum}, got {value!r}.")
    if not value >= minimum:
        raise ValueError(f"`{name}` must be at least {minimum}, got {value}.{remedy and f' {remedy}'}")


def check_count(name: str, value: int, minimum: int = 1, remedy: str = "") -> None:
    """Raise TypeError if argument `name` is no whole number, ValueError if it is below `minimum`."""
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise TypeError(f"`{name}` must be a whole number of at least {minimum}, got {value!r}.")
    check_at_least(name, value, minimum, remedy)


def check_positive(name: str, value: float, remedy: str = "") -> None:
    """Raise ValueError if argument `name` is zero, negative, NaN or infinite, TypeError if it is no number."""
    check_number(name, value)
    if not value > 0:
        raise ValueError(f"`{name}` must be positive, got {value}.{remedy and f' {remedy}'}")
    check_finite(name, value)


def check_finite(name: str, value: float) -> None:
    """Raise ValueError if argument `name` is infinite."""
    if value == inf:
        raise ValueError(f"`{name}` must be finite, got {value}.")


def check_within(name: str, value: float, low: float, high: float, remedy: str = "") -> None:
    """Raise ValueError unless argument `name` is in [low, high], TypeError if it is no number."""
    check_number(name, value)
    if not low <= value <= high:
        raise ValueError(f"`{name}` must be in [{low}, {high}], got {value}.{remedy and f' {remedy}'}")


def check_share(name: str, value: float) -> None:
    """Raise ValueError unless argument `name` is in [0, 1), TypeError if it is no number."""
    check_number(name, value)
    if not 0 <= value < 1:
        raise ValueError(f"`{name}` is a share in [0, 1), got {value}.")


def check_type(name: str, value: object, kind: type, remedy: str) -> None:
    """Raise TypeError unless argument `name` is an object of `kind`; `remedy` ends the message.

    Where `kind` is abstract, the methods that the object's class overrides are checked, too.
    """
    if not isinstance(value, kind):
        got = f"the class {value.__name__} itself" if isinstance(value, type) else f"a {type(value).__name__}"
        raise TypeError(f"`{name}` must be a {kind.__name__}, got {got}. {remedy}")
    if inspect.isabstract(kind):
        check_methods(value, kind)


def check_methods(plugin: object, kind: type) -> None:
    """Raise TypeError if `plugin` has a method that cannot be called as that of `kind`, or one for a property."""
    for name, declared in inspect.getmembers(kind):
        if name.startswith("_") and name != "__call__":
            continue
        if inspect.isfunction(declared):
            check_method(plugin, name, declared)
        elif isinstance(declared, property) and inspect.isfunction(getattr(type(plugin), name)):
            raise TypeError(f"`{type(plugin).__name__}.{name}` is a method, and is read as a value: add `@property`.")


def check_method(plugin: object, name: str, declared: Callable[..., Any]) -> None:
    """Raise TypeError if method `name` of `plugin` is async, or cannot be called with the arguments of `declared`."""
    method, label = getattr(plugin, name), f"`{type(plugin).__name__}.{name}`"
    if inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(method):
        raise TypeError(f"{label} is async, and is called without `await`: drop `async`.")
    _, *arguments = inspect.signature(declared).parameters.values()
    keywords = [each.name for each in arguments if each.kind is each.KEYWORD_ONLY]
    others = [each.name for each in arguments if each.name not in keywords]
    try:
        inspect.signature(method).bind(*others, **dict.fromkeys(keywords))
    except TypeError as error:
        called_with = ", ".join([*others, *(f"{each}=..." for each in keywords)])
        raise TypeError(f"{label} is called with ({called_with}): {error}.") from error
    except ValueError:
        return  # a builtin, whose signature Python does not know


def check_optional(name: str, value: object, kind: type, remedy: str) -> None:
    """Raise TypeError unless argument `name` is an object of `kind` or None; `remedy` ends the message."""
    if value is not None:
        check_type(name, value, kind, remedy)


def check_text(name: str, value: object, remedy: str) -> None:
    """Raise TypeError unless argument `name` is a text, ValueError if it is empty; `remedy` ends the message."""
    check_type(name, value, str, remedy)
    if not value:
        raise ValueError(f"`{name}` is empty. {remedy}")


def text_of(name: str, value: object, remedy: str) -> str:
    """Return argument `name`, a text or in Python perhaps a `Path`, as a text; errors are those of `check_text`."""
    text = str(value) if isinstance(value, Path) else value
    check_text(name, text, remedy)
    return str(text)


def folder_of(name: str, value: object) -> str:
    """Return argument `name`, a folder of this machine, as a text; raise ValueError for a URL."""
    text = text_of(name, value, "Give a folder.")
    if "://" in text:
        raise ValueError(
            f"`{name}` {text!r} is a URL, where no link can be made nor a file be replaced in one go: give a folder of "
            "this machine, or one that is mounted, also as `trainer.default_root_dir`."
        )
    return text


def check_list(name: str, values: object, kind: type, of: str) -> None:
    """Raise TypeError unless argument `name` is a list or tuple of objects of `kind`, in words `of`.

    True is no number.
    """
    if not isinstance(values, list | tuple) or not all(isinstance(v, kind) and not isinstance(v, bool) for v in values):
        raise TypeError(f"`{name}` must be a list of {of}, got {values!r}.")


def check_flag(name: str, value: object) -> None:
    """Raise TypeError unless argument `name` is True or False: the text 'no' would count as True."""
    if not isinstance(value, bool):
        raise TypeError(f"`{name}` must be True or False, got {value!r}.")


def check_choice(name: str, value: object, choices: Collection[object]) -> None:
    """Raise ValueError unless argument `name` is one of `choices`."""
    if value not in choices:
        raise ValueError(f"`{name}` must be one of {', '.join(map(repr, choices))}, got {value!r}.")


def check_distinct(name: str, values: Sequence[object]) -> None:
    """Raise TypeError if argument `name` is no tuple or list, ValueError if it has no values or repeats one."""
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise TypeError(f"`{name}` lists values, as in `({values!r},)`, got {values!r}.")
    if not values:
        raise ValueError(f"`{name}` is empty; list at least one value.")
    if len(set(values)) < len(values):
        raise ValueError(f"`{name}` must not repeat a value, got {list(values)}.")
