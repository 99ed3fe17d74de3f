"""Measure with one class of engine: only here a benchmark reaches into `VLLMEngine`."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from typing_extensions import override

from tlt_lightning.engine import RolloutProgress, VLLMEngine
from tlt_lightning.rollout import Request, Sampling

WITHOUT_WEIGHTS = {"load_format": "dummy", "enable_prefix_caching": False}
"""Arguments of an engine whose weights are random: only what its steps cost can be asked of it."""


class BenchEngine(VLLMEngine):
    """Runs vLLM past ends of text, and describes the live engine.

    Args:
        arguments: Arguments of vLLM's engine that `VLLMEngine` does not have.
        settings: Those that it has.
    """

    def __init__(self, *, arguments: Mapping[str, Any] | None = None, **settings: Any) -> None:
        super().__init__(**settings)
        self.arguments = dict(arguments or {})
        self.ignores_ends = True

    @override
    def setup(self, policy: str, *, max_model_len: int, seed: int) -> None:
        super().setup(policy, max_model_len=max_model_len, seed=seed)
        if self.arguments.get("load_format") == "dummy":
            self.policy_version = 0
            if (controller := self.inspect().controller) is not None:
                controller.alarm.window = 10**12  # a random head is meant to fail

    def _engine_args(self, policy: str, max_model_len: int, seed: int) -> Any:
        return replace(super()._engine_args(policy, max_model_len, seed), **self.arguments)

    def _params(self, sampling: Sampling, request: Request) -> Any:
        params = super()._params(sampling, request)
        if self.ignores_ends:
            params.ignore_eos, params.stop_token_ids = True, []
        return params

    def forget_prompts(self) -> None:
        """Drop cached prefixes, as a new policy does."""
        self.inspect().engine.reset_prefix_cache()

    def follow(
        self, requests: Sequence[Request], max_tokens: int, script: Generator[None, RolloutProgress, None]
    ) -> None:
        """Decode until the script ends; the script gets the progress of steps that only decode.

        Raises:
            RuntimeError: The requests ended first.
        """
        batch, is_over = len(requests), False
        assert self._writer is not None
        next(script)

        def move_on(progress: RolloutProgress) -> None:
            nonlocal is_over
            if progress.running == batch and progress.tokens >= batch:
                try:
                    script.send(progress)
                except StopIteration as end:
                    is_over = True
                    raise EndOfScript from end

        try:
            asked = requests if self._writer.pool.engine_ranks.is_first else []  # ranks of one engine pool theirs
            for _ in self.generate(asked, Sampling(max_tokens=max_tokens), seed=0, on_progress=move_on):
                pass
        except EndOfScript:
            pass
        if not is_over:
            raise RuntimeError(f"{batch} requests of {max_tokens} tokens ended before they were measured.")

    def describe(self) -> dict[str, Any]:
        """Return settings, cache, memory and graphs of the live engine."""
        parts, cuda = self.inspect(), torch.cuda.is_initialized()
        config = parts.engine.vllm_config
        found = {
            "async": bool(config.scheduler_config.async_scheduling),
            "tokens a step": config.scheduler_config.max_num_batched_tokens,
            "KV tokens": config.cache_config.num_gpu_blocks * config.cache_config.block_size,
            "peak GiB": round(torch.cuda.max_memory_allocated() / 2**30, 1) if cuda else None,
            "graphs MiB": None,
        }
        if parts.graphs is not None and parts.graphs.plan is not None:
            found["graphs MiB"] = round(sum(parts.graphs.mib.values()))
            found["graphs"] = parts.graphs.plan.table(parts.graphs.mib, parts.graphs.seconds)
        return found


class EndOfScript(Exception):
    """Ends a rollout from its progress callback."""
