"""Replace attributes for a while: parts of Lightning during a run, parts of vLLM during an engine's life."""

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
