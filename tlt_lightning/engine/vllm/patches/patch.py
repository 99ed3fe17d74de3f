"""Define the form of every repair of vLLM."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tlt_lightning.engine.vllm.internals import SUPPORTED, installed_version

Undo = Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """Repairs one fault of vLLM in this process.

    Args:
        why: The fault, and who suffers from it.
        versions: Releases of vLLM in which the fault was seen.
        is_needed: Tells whether this process has the fault: by trying, where that is cheap, else by the platform.
        apply: Repairs it for every engine that starts afterwards; returns the function that takes the repair back.
    """

    why: str
    versions: str
    is_needed: Callable[[], bool]
    apply: Callable[[], Undo]

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Repair the fault inside the block, if this process has the fault."""
        if not self.is_needed():
            yield
            return
        try:
            undo = self.apply()
        except (AttributeError, ImportError) as error:
            raise RuntimeError(
                f"vLLM {installed_version()} is not built as a repair of it expects ({error}); tlt_lightning supports "
                f"vLLM {SUPPORTED}."
            ) from error
        try:
            yield
        finally:
            undo()


def replace(owner: Any, name: str, new: Any) -> Undo:
    """Replace an attribute of a class or module; return a function that puts the old one back."""
    inherited, old = name not in vars(owner), getattr(owner, name)
    setattr(owner, name, new)

    def undo() -> None:
        if inherited:
            delattr(owner, name)
        else:
            setattr(owner, name, old)

    return undo
