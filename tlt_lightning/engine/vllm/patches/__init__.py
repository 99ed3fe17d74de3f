"""Faults of vLLM and their repairs: a file each, applied when an engine starts and undone when it closes."""

from __future__ import annotations

from collections.abc import Container, Iterator
from contextlib import ExitStack, contextmanager

from tlt_lightning.engine.vllm.patches import (
    cpu_experts,
    cpu_logprob_compile,
    cpu_temperatures,
    cpu_tied_head,
    cublas_workspaces,
    drafter_first_pass,
    flash_splits,
    hugging_face_classes,
)
from tlt_lightning.engine.vllm.patches.patch import Patch

PATCHES: tuple[Patch, ...] = (
    cpu_temperatures.PATCH,
    cpu_logprob_compile.PATCH,
    cpu_tied_head.PATCH,
    cpu_experts.PATCH,
    cublas_workspaces.PATCH,
    drafter_first_pass.PATCH,
    flash_splits.PATCH,
    hugging_face_classes.PATCH,
)


@contextmanager
def patched(without: Container[Patch] = ()) -> Iterator[None]:
    """Repair inside the block what is found faulty; an engine starts, lives and ends inside it.

    Args:
        without: Patches that are left out.
    """
    with ExitStack() as stack:
        for patch in PATCHES:
            if patch not in without:
                stack.enter_context(patch.applied())
        yield
