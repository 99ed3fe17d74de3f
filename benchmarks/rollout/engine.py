"""The engine that is measured, and the trace of its steps that costs least."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from typing_extensions import override

from benchmarks.common.engines import UnsyncedEngine
from benchmarks.rollout.setup import Setup
from tlt_lightning.engine.vllm.speculation import Speculation
from tlt_lightning.speculation.trace import StepTrace


class MeasuredEngine(UnsyncedEngine):
    """An engine with the weights that are on disk.

    Args:
        speculation: How to speculate; None decodes plainly.
        arguments: Arguments of vLLM's engine that `VLLMEngine` does not have.
        setup: What it is for.
    """

    def __init__(self, speculation: Speculation | None, arguments: dict[str, Any], setup: Setup) -> None:
        super().__init__(
            dtype=setup.dtype,  # type: ignore[arg-type]
            max_num_seqs=setup.num_requests,
            gpu_memory_utilization=0.1,  # the cache has a size of its own; vLLM only asks whether so much is free
            kv_cache_gib=setup.kv_cache_gib,
            enforce_eager=setup.enforce_eager,
            sleep=False,
            speculation=speculation,
        )
        self.arguments = arguments

    def _engine_args(self, policy: str, max_model_len: int, seed: int) -> Any:
        return replace(super()._engine_args(policy, max_model_len, seed), **self.arguments)


class MemoryTrace(StepTrace):
    """A trace that is kept instead of written."""

    def __init__(self) -> None:
        super().__init__("")
        self.rows: list[dict[str, Any]] = []

    @override
    def begin_rollout(self) -> None:
        self.rows = []

    @override
    def write(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
