"""vLLM's worker in this process, on the device that this rank trains on."""

from __future__ import annotations

import torch
from typing_extensions import override
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from tlt_lightning.engine.vllm_internals import is_cpu_build


class RankExecutor(UniProcExecutor):
    """One engine a rank, all independent of each other.

    vLLM's own executor takes the first visible GPU, and calls every engine rank 0: under DDP all engines would share
    one GPU, and one cache of code that is compiled for a single device.
    """

    @override
    def _distributed_args(self) -> tuple[str, int, int]:
        init_method, _, device = super()._distributed_args()
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        return init_method, rank, device if is_cpu_build() else torch.cuda.current_device()
