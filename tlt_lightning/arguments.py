"""Declare arguments once, as annotations with their bounds, and check them by these declarations.

`checked` reads the annotations of a constructor as objects, and so does the command line, whose `--help` shows the
bounds. A module that declares bounds therefore does without `from __future__ import annotations`: as texts, annotations
check nothing.

Example:
    >>> @checked("clip.")
    ... class Clip:
    ...     def __init__(self, low: Annotated[float, Bound(0, 1), "The ratio is kept above 1 minus it."] = 0.2) -> None:
    ...         self.low = low
    >>> Clip(low=2)
    Traceback (most recent call last):
    ValueError: `clip.low` must be in [0, 1], got 2. The ratio is kept above 1 minus it.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from math import inf
from numbers import Integral, Real
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

T = TypeVar("T", bound=Callable[..., Any])


@dataclass(frozen=True, repr=False)
class Bound:
    """Bounds a number in an annotation; NaN is outside of every bound.

    Args:
        low: Smallest value.
        high: Largest value.
        excludes: Values that are refused though they lie between.
    """

    low: float = -inf
    high: float = inf
    excludes: tuple[float, ...] = ()

    def __contains__(self, value: Any) -> bool:
        return self.low <= value <= self.high and value not in self.excludes

    def __repr__(self) -> str:  # what `--help` shows
        finite = " and finite" if inf in self.excludes else ""
        if self.high == inf:
            return ("positive" if self.low in self.excludes else f"at least {self.low:g}") + finite
        left, right = "(" if self.low in self.excludes else "[", ")" if self.high in self.excludes else "]"
        return f"in {left}{self.low:g}, {self.high:g}{right}"


Count = Annotated[int, Bound(1)]
CountOrZero = Annotated[int, Bound(0)]
Positive = Annotated[float, Bound(0, excludes=(0, inf))]
NotNegative = Annotated[float, Bound(0, excludes=(inf,))]
Share = Annotated[float, Bound(0, 1, excludes=(1,))]
Probability = Annotated[float, Bound(0, 1)]

_NAMES = {int: "a whole number", float: "a number", bool: "True or False", str: "a string", NoneType: "None"}


def checked(prefix: str = "") -> Callable[[T], T]:
    """Return a decorator for a class or function whose arguments are checked by their annotations at every call.

    Args:
        prefix: Stands before an argument's name in messages, such as ``"lora."``.

    The call raises TypeError or ValueError, which name argument, value and rule. A text among an annotation's notes
    ends the message.
    """

    def decorate(target: T) -> T:
        function = target.__init__ if isinstance(target, type) else target  # type: ignore[misc]
        signature, hints = inspect.signature(function), inspect.get_annotations(function)

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                given = signature.bind(*args, **kwargs).arguments
            except TypeError:
                given = {}  # the call below says what is missing or too much
            for name, value in given.items():
                if name in hints:
                    check_argument(prefix + name, value, hints[name])
            return function(*args, **kwargs)

        if isinstance(target, type):
            target.__init__ = call  # type: ignore[misc]
            return target
        return call  # type: ignore[return-value]

    return decorate


def check_argument(name: str, value: object, hint: Any) -> None:
    """Raise TypeError or ValueError unless the value of argument `name` is what the annotation `hint` allows."""
    kind, notes = _split(hint)
    options = [_split(option) for option in (get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,))]
    remedy = "".join(f" {note}" for note in notes if isinstance(note, str))
    fitting = next((option for option in options if _fits(value, option[0])), None)
    if fitting is None:
        rule = " or ".join(dict.fromkeys(_describe(option) for option, _ in options))
        error = ValueError if any(get_origin(option) is Literal for option, _ in options) else TypeError
        raise error(f"`{name}` must be {rule}, got {_shown(value):.200}.{remedy}")
    for bound in [*notes, *fitting[1]]:
        if isinstance(bound, Bound) and isinstance(value, Real) and value not in bound:
            raise ValueError(f"`{name}` must be {bound!r}, got {value}.{remedy}")


def checked_attributes(instance: Any, kind: type) -> dict[str, Any]:
    """Return the attributes that are named as the arguments of `kind`, checked by their annotations there."""
    hints = inspect.get_annotations(kind.__init__)  # type: ignore[misc]
    attributes = {name: getattr(instance, name) for name in hints if name != "return"}
    for name, value in attributes.items():
        check_argument(name, value, hints[name])
    return attributes


def _split(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return an annotation without its notes, and these."""
    return (get_args(hint)[0], hint.__metadata__) if get_origin(hint) is Annotated else (hint, ())


def _fits(value: object, kind: Any) -> bool:
    """Return whether a value is of a kind; what cannot be told from outside, such as what a function takes, fits."""
    origin, parts = get_origin(kind), get_args(kind)
    if kind in (int, float):
        return isinstance(value, Integral if kind is int else Real) and not isinstance(value, bool)
    if kind is str:
        return isinstance(value, str | Path)  # which constructors make a text
    if kind is None or kind is NoneType:
        return value is None
    if origin is Literal:
        return value in parts
    if origin in (tuple, list, Sequence):
        of_values = parts and parts[0] in (int, float, str)
        return isinstance(value, list | tuple) and (not of_values or all(_fits(each, parts[0]) for each in value))
    if origin in (dict, Mapping):
        return isinstance(value, Mapping)
    if origin is Callable:
        return callable(value)
    return not inspect.isclass(kind) or kind is Any or getattr(kind, "_is_protocol", False) or isinstance(value, kind)


def _shown(value: object) -> str:
    """Return how a value of the wrong kind is named: plain data as it is, other objects by their class."""
    if isinstance(value, type):
        return f"the class {value.__name__} itself"
    if value is None or isinstance(value, str | bytes | Real | list | tuple | dict | set):
        return repr(value)
    return _with_article(type(value).__name__)


def _with_article(noun: str) -> str:
    return f"{'an' if noun[0] in 'AEIOUaeiou' else 'a'} {noun}"


def _describe(kind: Any) -> str:
    """Return what a kind of values is called in a message."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Literal:
        return f"one of {', '.join(map(repr, parts))}"
    if origin in (tuple, list, Sequence):
        return f"a list of {_describe(_split(parts[0])[0]).removeprefix('a ')}s" if parts else "a list"
    if origin is Callable:
        return "a function or a class"
    if kind in _NAMES or kind is None:
        return _NAMES[kind or NoneType]
    return _with_article(getattr(kind, "__name__", str(kind)))


def text_of(name: str, value: object, remedy: str) -> str:
    """Return argument `name`, a string or in Python perhaps a `Path`, as a string; raise ValueError if it is empty."""
    check_argument(name, value, Annotated[str, remedy])
    if not value:
        raise ValueError(f"`{name}` is empty. {remedy}")
    return str(value)


def folder_of(name: str, value: object) -> str:
    """Return argument `name`, a folder of this machine, as a text; raise ValueError for a URL."""
    text = text_of(name, value, "Give a folder.")
    if "://" in text:
        raise ValueError(
            f"`{name}` {text!r} is a URL, where no link can be made nor a file be replaced in one go: give a folder of "
            "this machine, or one that is mounted, also as `trainer.default_root_dir`."
        )
    return text
