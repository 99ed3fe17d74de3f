"""Replace for a while: parts of Lightning in a run, parts of vLLM in an engine's life, environment variables."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any


def replace(undone: ExitStack, owner: Any, name: str, new: Any) -> None:
    """Replace an attribute of an object, a class or a module until `undone` is closed."""
    if name in vars(owner):
        undone.callback(setattr, owner, name, vars(owner)[name])
    else:
        undone.callback(delattr, owner, name)
    setattr(owner, name, new)


@contextmanager
def replaced(owner: Any, name: str, new: Any) -> Iterator[None]:
    """Replace an attribute for the block."""
    with ExitStack() as undone:
        replace(undone, owner, name, new)
        yield


@contextmanager
def environment(name: str, value: str | None) -> Iterator[None]:
    """Set an environment variable for the block; None leaves it out."""
    before = os.environ.get(name)
    try:
        _set(name, value)
        yield
    finally:
        _set(name, before)


def _set(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value
