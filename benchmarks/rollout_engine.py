"""The engine that is measured, and the trace of its steps that costs least."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rollout_setup import Setup
from typing_extensions import override

from tlt_lightning.engine import Sampling, VLLMEngine
from tlt_lightning.engine.vllm_speculation import Speculation
from tlt_lightning.engine.vllm_trace import StepTrace


class MeasuredEngine(VLLMEngine):
    """An engine with the weights that are on disk, which can be told to write on after an end.

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
        self.ignores_ends = False

    def _engine_args(self, policy: str, max_model_len: int, seed: int) -> Any:
        return replace(super()._engine_args(policy, max_model_len, seed), **self.arguments)

    @override
    def setup(self, policy: str, *, max_model_len: int, seed: int) -> None:
        super().setup(policy, max_model_len=max_model_len, seed=seed)
        self._policy_version = 0  # vLLM has read the weights itself

    def _params(self, sampling: Sampling, max_tokens: int | None) -> Any:
        params = super()._params(sampling, max_tokens)
        if self.ignores_ends:
            params.ignore_eos, params.stop_token_ids = True, []
        return params


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
