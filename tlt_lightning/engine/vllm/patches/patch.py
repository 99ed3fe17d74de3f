"""Define the form of every repair of vLLM."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import wraps
from pkgutil import resolve_name
from typing import Any

from tlt_lightning.engine.vllm.internals import SUPPORTED, installed_version
from tlt_lightning.replacing import replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """Repairs one fault of vLLM in this process.

    Args:
        why: The fault, and who suffers from it.
        versions: Releases of vLLM in which the fault was seen.
        is_needed: Tells whether this process has the fault.
        around: Methods and functions by their dotted names, and what is called in the place of each: with the usual
            one before its own arguments.
    """

    why: str
    versions: str
    is_needed: Callable[[], bool] = lambda: True
    around: Mapping[str, Callable[..., Any]]

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Repair the fault for every engine that starts inside the block."""
        with ExitStack() as undone:
            try:
                for place, around in self.around.items():
                    owner, _, name = place.rpartition(".")
                    _wrap(undone, resolve_name(owner), name, around)
            except (AttributeError, ImportError) as error:
                raise RuntimeError(
                    f"vLLM {installed_version()} is not built as a repair of it expects ({error}); tlt_lightning "
                    f"supports vLLM {SUPPORTED}."
                ) from error
            yield


def _wrap(undone: ExitStack, owner: Any, name: str, around: Callable[..., Any]) -> None:
    usual = getattr(owner, name)

    @wraps(usual)
    def call(*args: Any, **kwargs: Any) -> Any:
        return around(usual, *args, **kwargs)

    replace(undone, owner, name, call)
