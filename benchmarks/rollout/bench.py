"""Measure one live engine: it rolls out under any arm it can run, and writes texts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import load_file

from benchmarks.common.engine import BenchEngine
from benchmarks.rollout.arms import KS, WarmUpSelector, arms_of, is_vllm_alone
from benchmarks.rollout.setup import Setup
from benchmarks.rollout.steps import EDGES, Row, row_of, summarize
from tlt_lightning.engine.vllm.speculation import Speculation
from tlt_lightning.speculation import StrategySelector

Table = Sequence[Sequence[int]]
Written = list[tuple[list[int], list[float]]]
"""Tokens and log-probs of each response."""
WARM_UP_TOKENS = 64
"""Response tokens in each range of batch sizes while warming up: two dozen steps, a turn for each strategy."""


class Bench:
    """Runs an engine and its arms.

    `kind` is one of `ENGINES`; `table` is vLLM's table of draft lengths by batch size, for the engine that takes one.
    """

    def __init__(self, setup: Setup, kind: str, table: Table = ()) -> None:
        self.setup = setup
        makers = {arm.name: arm.selector for arm in arms_of(setup.heads).values() if arm.engine == kind}
        self.selector = WarmUpSelector({name: make() for name, make in makers.items() if make is not None})
        kind, _, quantization = kind.partition(" in ")
        self.engine = BenchEngine(
            dtype="bfloat16" if quantization else setup.dtype,
            quantization=quantization or None,
            max_num_seqs=setup.num_requests,
            gpu_memory_utilization=0.1,  # the cache has a size of its own; vLLM only asks whether so much is free
            kv_cache_gib=setup.kv_cache_gib,
            enforce_eager=setup.enforce_eager,
            sleep=False,
            speculation=speculation_of(setup, kind, self.selector),
            arguments=vllm_arguments(setup.heads[0], kind, table) if is_vllm_alone(kind) else None,
        )
        began = time.perf_counter()
        self.engine.setup(setup.policy, max_model_len=setup.max_model_len, seed=setup.seed)
        files = sorted(Path(setup.policy).glob("*.safetensors"))
        self.engine.update_weights((item for file in files for item in load_file(file).items()), version=0)
        self.start_seconds = time.perf_counter() - began

    def warm_up(self) -> None:
        """Let selectors measure steps, then go through all strategies at all batch sizes; others must stand still."""
        self.engine.warm_up()
        lengths = warm_up_lengths(self.setup.num_requests, self.setup.max_tokens)
        for _ in self.engine.generate(self.setup.requests(lengths), self.setup.sampling, seed=1):
            pass

    def rollout(self, arm: str, lengths: list[int] | None, seed: int) -> dict[str, Any]:
        """Roll out once; `lengths` are tokens of each response, past end tokens; None lets it end."""
        self._begin(arm, ignores_ends=lengths is not None)
        rows: list[Row] = []
        requests = self.setup.requests(lengths)
        began = time.perf_counter()
        generated = self.engine.generate(
            requests, self.setup.sampling, seed=seed, on_progress=lambda progress: rows.append(row_of(progress))
        )
        responses = sorted(generated, key=lambda response: response.request_id)
        seconds = time.perf_counter() - began
        stats = {name.removeprefix("speculation/"): round(value, 5) for name, value in self.engine.stats().items()}
        lengths = [len(response.token_ids) for response in responses]
        return summarize(rows, len(requests), seconds, sum(lengths)) | stats | {"lengths": lengths}

    def write(self, arm: str) -> Written:
        """Return what an arm writes with ends as they come."""
        self._begin(arm, ignores_ends=False)
        requests = self.setup.requests()
        responses = self.engine.generate(requests, self.setup.sampling, seed=self.setup.seed)
        found = {each.request_id: (list(each.token_ids), list(each.logps)) for each in responses}
        return [found[request.id] for request in requests]

    def describe(self) -> dict[str, Any]:
        """Return what the engine is and holds."""
        return {"start s": round(self.start_seconds, 1), **self.engine.describe()}

    def close(self) -> None:
        """Free the engine."""
        self.engine.close()

    def _begin(self, arm: str, *, ignores_ends: bool) -> None:
        self.selector.in_force = self.selector.selectors.get(arm)
        self.engine.ignores_ends = ignores_ends
        self.engine.forget_prompts()


def speculation_of(setup: Setup, kind: str, selector: StrategySelector) -> Speculation | None:
    """Return how an engine of a kind speculates, by the head that it names or the first; None for vLLM alone."""
    if kind == "plain" or is_vllm_alone(kind):
        return None
    way, _, name = kind.partition(" ")
    named = {Path(head).name: head for head in setup.heads}
    head = None if way in ("siblings", "ngram") else named.get(name, next(iter(setup.heads), None))
    return Speculation(
        selector=selector,
        head=head,
        siblings=way in ("mixed", "siblings"),
        ngram=way == "ngram",
        max_draft_tokens=max(KS),
        draft_sampling="probabilistic" if way == "sampled" else "greedy",
    )


def vllm_arguments(head: str, kind: str, table: Table) -> dict[str, Any]:
    """Return the arguments of an engine in which vLLM speculates by itself, of kind `table` or `vLLM K=<n>`."""
    drafts = kind.partition(" K=")[2]
    config: dict[str, Any] = {
        "method": "eagle3",
        "model": head,
        "num_speculative_tokens": int(drafts) if drafts else max(k for *_, k in table),
        "draft_sample_method": "greedy",
        "rejection_sample_method": "standard",
    }
    if not drafts:
        config["num_speculative_tokens_per_batch_size"] = [tuple(entry) for entry in table]
    return {"speculative_config": config}


def warm_up_lengths(num_requests: int, max_tokens: int) -> list[int]:
    """Return lengths that spend `WARM_UP_TOKENS` in each range of batch sizes, down to one."""
    tokens = min(WARM_UP_TOKENS, max_tokens // len(EDGES))
    bins = np.interp(range(1, num_requests + 1), EDGES, range(len(EDGES)))  # request n ends while n are running
    return [round(tokens * (len(EDGES) - place)) for place in bins]
