"""Run vLLM's worker in this process, on the device that this rank trains on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from typing_extensions import override
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.kv_cache_interface import FullAttentionSpec

from tlt_lightning.engine.vllm.internals import is_cpu_build
from tlt_lightning.engine.vllm.rank_group import RankGroup


class RankExecutor(UniProcExecutor):
    """Runs this rank's worker: an engine of its own, or its part of one that neighbouring ranks are together.

    vLLM's own executor takes the first visible GPU, and calls every engine rank 0: under DDP all engines would share
    one GPU, and one cache of code that is compiled for a single device.
    """

    on_step: Callable[[SchedulerOutput], None] | None = None
    """Called with each step before it runs."""

    @override
    def _distributed_args(self) -> tuple[str, int, int]:
        init_method, _, device = super()._distributed_args()
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        return init_method, rank, device if is_cpu_build() else torch.cuda.current_device()

    @override
    def execute_model(self, scheduler_output: SchedulerOutput, non_block: bool = False) -> Any:
        if self.on_step is not None:
            self.on_step(scheduler_output)
        return super().execute_model(scheduler_output, non_block)

    @override
    def determine_available_memory(self) -> list[int]:
        """Return the bytes of keys and values, the same on all ranks of an engine: they schedule alike."""
        own = self._usable_memory()
        return own if self.parallel_config.world_size == 1 else [RankGroup().smallest(min(own))]

    def _usable_memory(self) -> list[int]:
        """Return free bytes for keys and values, at most what all requests at full length fill.

        vLLM takes all it may, for prefixes that a server meets again. New weights make prefixes worthless; memory that
        lies idle is missed by the trainer, and mapped anew at each waking, at 5 ms a GiB.
        """
        free = super().determine_available_memory()
        config = self.vllm_config
        if config.cache_config.kv_cache_memory_bytes is not None:
            return free  # as the user wishes
        usable = []
        for specs in self.get_kv_cache_specs():
            if not all(isinstance(spec, FullAttentionSpec) for spec in specs.values()):
                return free  # layers of several kinds share pages in ways of their own
            # A block more for each request, so that no rounding makes one of them wait.
            request = sum(spec.max_memory_usage_bytes(config) + spec.page_size_bytes for spec in specs.values())
            usable.append(request * config.scheduler_config.max_num_seqs)
        return [min(pair) for pair in zip(free, usable, strict=True)]
