"""Run vLLM's worker in this process, on the device that this rank trains on, perhaps with the ranks beside it."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override
from vllm.distributed import parallel_state
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.kv_cache_interface import FullAttentionSpec

from tlt_lightning.engine.start_up import StartUp
from tlt_lightning.engine.vllm.graphs import PlannedGraphs, release_graphs
from tlt_lightning.engine.vllm.internals import is_cpu_build, reach
from tlt_lightning.ranks.engine_ranks import ALONE, EngineRanks
from tlt_lightning.ranks.joined_ranks import JoinedRanks, own_rank

if TYPE_CHECKING:
    from vllm.v1.engine.llm_engine import LLMEngine


class RankExecutor(UniProcExecutor):
    """Runs this rank's worker: an engine of its own, or its part of one that neighbouring ranks are together.

    vLLM's own executor takes the first visible GPU, and calls every engine rank 0: under DDP all engines would share
    one GPU, and one cache of code that is compiled for a single device.
    """

    on_step: Callable[[SchedulerOutput], None] | None = None
    """Called with each step before it runs."""

    @cached_property
    def start_up(self) -> StartUp:
        """Seconds of its start by part."""
        return StartUp()

    @override
    def _init_executor(self) -> None:
        with self.start_up.part("reading weights"):
            super()._init_executor()

    @override
    def _distributed_args(self) -> tuple[str, int, int]:
        init_method, _, device = super()._distributed_args()
        return init_method, own_rank(), device if is_cpu_build() else torch.cuda.current_device()

    @override
    def execute_model(self, scheduler_output: SchedulerOutput, non_block: bool = False) -> Any:
        if self.on_step is not None:
            self.on_step(scheduler_output)
        return super().execute_model(scheduler_output, non_block)

    @override
    def determine_available_memory(self) -> list[int]:
        """Return the bytes of keys and values, the same on all ranks of an engine: they schedule alike."""
        with self.start_up.part("compiling and measuring memory"):
            usable = self._usable_memory()
        return usable if self.vllm_config.parallel_config.tensor_parallel_size == 1 else _group().smallest(min(usable))

    @override
    def compile_or_warm_up_model(self) -> None:
        with self.start_up.part("warming up, with CUDA graphs"):
            super().compile_or_warm_up_model()

    @override
    def shutdown(self) -> None:
        """Free graphs, stop the worker, and remove the files of its group's sockets: neither vLLM nor ZeroMQ does."""
        runner = getattr(self.driver_worker.worker, "model_runner", None)
        if runner is not None and not is_cpu_build():
            torch.cuda.synchronize()
            release_graphs(runner)
        queue = _group_of_vllm().mq_broadcaster if reach(parallel_state, "model_parallel_is_initialized")() else None
        if queue is not None and queue._is_writer:  # the ranks have long been connected
            for address in (queue.handle.local_subscribe_addr, queue.handle.local_notify_addr):
                Path(address.removeprefix("ipc://")).unlink(missing_ok=True)
        super().shutdown()

    def join(self, engine: LLMEngine, graphs: PlannedGraphs | None) -> EngineRanks:
        """Return the ranks of a started engine.

        Raises:
            RuntimeError: The ranks have not equal caches and plans of CUDA graphs.
        """
        group = _group()
        if group.num_ranks == 1:
            return ALONE
        planned = None if graphs is None else zlib.crc32(repr(graphs.plan).encode())
        blocks = reach(engine, "vllm_config.cache_config").num_gpu_blocks
        facts = (f"{blocks} blocks of cache", f"checksum of planned CUDA graphs {planned}")
        group.check_same("start of the engine", facts)
        self.on_step = partial(_note, group)
        return group

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


def _group() -> JoinedRanks:
    """Return the ranks that are this engine, once it has started."""
    return JoinedRanks(_group_of_vllm().cpu_group)


def _group_of_vllm() -> Any:
    return reach(parallel_state, "get_tp_group")()


def _note(group: JoinedRanks, output: SchedulerOutput) -> None:
    """Note the tokens of a step that begins by request, and which of them are drafts."""
    drafts = output.scheduled_spec_decode_tokens.values()
    group.note((*output.num_scheduled_tokens.values(), *map(len, drafts)))
