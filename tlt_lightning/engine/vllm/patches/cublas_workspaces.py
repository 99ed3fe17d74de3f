"""cuBLAS's workspaces, kept alive for the CUDA graphs that were captured with them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def owned_workspaces() -> Iterator[None]:
    """Let every CUDA graph captured in this block have its cuBLAS workspace in its own memory pool.

    PyTorch gives each stream one workspace and frees it when asked to; a graph keeps the bare pointer. The rehearsal
    before a capture makes a workspace outside the graph's pool, and Lightning frees it when the trainer sets up its
    device, after the engine has started (`CUDAAccelerator.setup`). Replays then write into memory that is somebody
    else's, or nobody's: an illegal memory access where the freed segment was unmapped, silence elsewhere. Dropping the
    workspaces right before a capture makes the capture allocate its own, which lives as long as the graph.
    """
    enter = torch.cuda.graph.__enter__

    def enter_without_workspaces(graph: Any) -> None:
        torch._C._cuda_clearCublasWorkspaces()
        enter(graph)

    torch.cuda.graph.__enter__ = enter_without_workspaces  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.cuda.graph.__enter__ = enter  # type: ignore[method-assign]
