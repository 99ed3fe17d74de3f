"""Let cuBLAS workspaces live as long as the CUDA graphs captured with them.

PyTorch gives each stream one workspace and frees it when asked to; a graph keeps the bare pointer. The rehearsal before
a capture makes a workspace outside the graph's pool, and Lightning frees it when the trainer sets up its device, after
the engine has started (`CUDAAccelerator.setup`). Replays then write into freed memory: an illegal memory access where
it was unmapped, silence elsewhere. With workspaces dropped right before it, a capture allocates its own in the pool.
"""

from typing import Any

import torch

from tlt_lightning.engine.vllm.patches.patch import Patch


def _enter_without_workspaces(enter: Any, graph: Any) -> None:
    torch._C._cuda_clearCublasWorkspaces()
    enter(graph)


PATCH = Patch(
    why="A captured CUDA graph keeps a pointer to a cuBLAS workspace that Lightning frees: replays write into memory "
    "that is no longer theirs.",
    versions="0.32 with torch 2.11 and 2.13, CUDA",
    is_needed=torch.cuda.is_available,
    around={"torch.cuda.graph.__enter__": _enter_without_workspaces},
)
