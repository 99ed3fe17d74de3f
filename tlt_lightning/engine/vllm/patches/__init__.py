"""Repair faults of vLLM, a file each, from an engine's start to its close."""

from __future__ import annotations

from collections.abc import Container, Iterator
from contextlib import ExitStack, contextmanager

from tlt_lightning.engine.vllm.patches import (
    asleep_free,
    coupled_drafts,
    cpu_experts,
    cpu_generators,
    cpu_logprob_compile,
    cpu_temperatures,
    cpu_tied_head,
    cublas_workspaces,
    drafter_first_pass,
    finite_drafts,
    flash_splits,
    hugging_face_classes,
    shared_device,
)
from tlt_lightning.engine.vllm.patches.patch import Patch

PATCHES: tuple[Patch, ...] = (
    cpu_temperatures.PATCH,
    cpu_logprob_compile.PATCH,
    cpu_tied_head.PATCH,
    cpu_experts.PATCH,
    cpu_generators.PATCH,
    coupled_drafts.PATCH,
    cublas_workspaces.PATCH,
    drafter_first_pass.PATCH,
    finite_drafts.PATCH,
    flash_splits.PATCH,
    hugging_face_classes.PATCH,
    asleep_free.PATCH,
    shared_device.PATCH,
)


@contextmanager
def patched(without: Container[Patch] = ()) -> Iterator[None]:
    """Repair vLLM's faults, but not those of `without`, while an engine lives inside the block."""
    with ExitStack() as stack:
        for patch in PATCHES:
            if patch not in without:
                stack.enter_context(patch.applied())
        yield
