"""Repair faults of vLLM, a file each, from an engine's start to its close."""

from collections.abc import Container, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pkgutil import iter_modules

from tlt_lightning.engine.vllm.patches.patch import Patch

_FILES = [import_module(f"{__name__}.{file.name}") for file in iter_modules(__path__)]
PATCHES: tuple[Patch, ...] = tuple(file.PATCH for file in _FILES if hasattr(file, "PATCH"))


@contextmanager
def patched(without: Container[Patch] = ()) -> Iterator[None]:
    """Repair vLLM's faults, but not those of `without`, while an engine lives inside the block."""
    with ExitStack() as stack:
        for patch in PATCHES:
            if patch not in without and patch.is_needed():
                stack.enter_context(patch.applied())
        yield
