"""Define the form of every repair of vLLM."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

from tlt_lightning.engine.vllm.internals import SUPPORTED, installed_version
from tlt_lightning.replacing import replace

Replace = Callable[[Any, str, Any], None]
"""Replaces an attribute of a class or module, until the engine closes."""


def wrap(replace: Replace, owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Replace a method by one that calls `around`, with the usual one before the method's own arguments."""
    usual = getattr(owner, name)

    @wraps(usual)
    def call(*args: Any, **kwargs: Any) -> Any:
        return around(usual, *args, **kwargs)

    replace(owner, name, call)


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """Repairs one fault of vLLM in this process.

    Args:
        why: The fault, and who suffers from it.
        versions: Releases of vLLM in which the fault was seen.
        is_needed: Tells whether this process has the fault: by trying, where that is cheap, else by the platform.
        apply: Repairs it for every engine that starts afterwards, by the `Replace` that it is given.
    """

    why: str
    versions: str
    is_needed: Callable[[], bool]
    apply: Callable[[Replace], None]

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Repair the fault inside the block, if this process has the fault."""
        with ExitStack() as undone:
            if self.is_needed():
                try:
                    self.apply(partial(replace, undone))
                except (AttributeError, ImportError) as error:
                    raise RuntimeError(
                        f"vLLM {installed_version()} is not built as a repair of it expects ({error}); tlt_lightning "
                        f"supports vLLM {SUPPORTED}."
                    ) from error
            yield
