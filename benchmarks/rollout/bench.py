"""One live engine that is measured: it rolls out under any arm it can run, writes texts, and tells what it holds."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from benchmarks.common.engines import Enough
from benchmarks.rollout.arms import KS, RANDOM_HEAD, Arm, Tour, arms_of
from benchmarks.rollout.engine import MeasuredEngine, MemoryTrace
from benchmarks.rollout.heads import head_tensors, redrawn
from benchmarks.rollout.setup import CELL_STEPS, SETTLE_STEPS, Setup
from benchmarks.rollout.steps import EDGES, StepRecorder, WatchedScheduler, acceptance_by_phase, summarize
from tlt_lightning.engine import Request, RolloutProgress, Sampling
from tlt_lightning.engine.vllm.speculation import Speculation
from tlt_lightning.speculation import OFF, FullGraphPool, StrategySelector
from tlt_lightning.speculation.counters import SpeculationCounters
from tlt_lightning.speculation.lookup import RunningTexts

Table = Sequence[Sequence[int]]
WARM_UP_TOKENS = 64
"""Response tokens in each range of batch sizes while warming up: two dozen steps, a turn for each strategy."""


class Bench:
    """An engine and the arms that run in it.

    Args:
        setup: What is rolled out.
        kind: Which engine, a key of `ENGINES`.
        table: vLLM's table of draft lengths by batch size, for the engine that takes one.
    """

    def __init__(self, setup: Setup, kind: str, table: Table = ()) -> None:
        self.setup, self.table = setup, table
        of = "steered" if kind == "full_pool" else kind
        self.arms = {name: arm for name, arm in arms_of(setup.heads).items() if arm.engine == of}
        makers = [arm.selector for arm in self.arms.values() if arm.selector is not None]
        self.tour = Tour([make() for make in makers])
        self.selectors: dict[str, StrategySelector] = {}
        self.head: str | None = setup.heads[0] if setup.heads else None
        self.engine = MeasuredEngine(self._speculation(kind), self._arguments(kind), setup)
        began = time.perf_counter()
        self.engine.setup(setup.policy, max_model_len=setup.max_model_len, seed=setup.seed)
        self.start_seconds = time.perf_counter() - began
        self.watched: WatchedScheduler | None = None
        if kind == "table":
            self.watched = WatchedScheduler(self.engine.inspect().scheduler)
        if kind != "full_pool":
            self._warm_up()

    def _speculation(self, kind: str) -> Speculation | None:
        if kind not in ("steered", "probabilistic", "full_pool"):
            return None
        sampled = kind == "probabilistic"
        return Speculation(
            selector=self.tour,
            head=self.head,
            siblings=not sampled,
            ngram=not sampled,
            max_draft_tokens=max(KS),
            draft_sampling="probabilistic" if sampled else "greedy",
            graph_pool=FullGraphPool() if kind == "full_pool" else None,
        )

    def _arguments(self, kind: str) -> dict[str, Any]:
        if kind == "defaults":
            return {"max_num_batched_tokens": None}  # `VLLMEngine` would choose more than vLLM does
        arguments: dict[str, Any] = {"max_num_batched_tokens": self.setup.max_num_batched_tokens}
        if kind == "table":
            arguments["speculative_config"] = {
                "method": "eagle3",
                "model": self.head,
                "num_speculative_tokens": max(k for *_, k in self.table),
                "draft_sample_method": "greedy",
                "rejection_sample_method": "standard",
                "num_speculative_tokens_per_batch_size": [tuple(entry) for entry in self.table],
            }
        return arguments

    # What can be asked of it

    def rollout(self, arm: str, lengths: list[int] | None, seed: int, texts: bool = False) -> dict[str, Any]:
        """Roll out once.

        Args:
            arm: Name of the arm.
            lengths: Tokens of each response, written whatever the policy would do; None lets it end.
            seed: Of the sampling.
            texts: Whether to return the responses' tokens too.
        """
        began = time.perf_counter()
        trace = self._steer(self.arms[arm])
        steered = time.perf_counter() - began
        self.engine.ignores_ends = lengths is not None
        self._live.reset_prefix_cache()  # a new policy has read no prompt yet
        recorder = StepRecorder(max(lengths or [self.setup.max_tokens]), self._counters())
        requests = self.setup.requests(lengths)
        began = time.perf_counter()
        generated = self.engine.generate(requests, self.setup.sampling, seed=seed, on_progress=recorder)
        responses = sorted(generated, key=lambda response: response.request_id)
        seconds = time.perf_counter() - began
        recorder.snap()
        written = [len(response.token_ids) for response in responses]
        result = summarize(recorder.rows, len(requests), seconds, sum(written)) | self._speculated()
        result["acceptance_by_phase"] = acceptance_by_phase(recorder.phases)
        result |= {"lengths": written, "steer_seconds": round(steered, 3)}
        if trace is not None:
            result["trace"] = trace.rows
        if texts:
            result["texts"] = [list(response.token_ids) for response in responses]
        return result

    def cell(self, arm: str, batch: int, context: int, stream: list[int]) -> dict[str, Any]:
        """Tokens per second at a fixed batch and a context that grows little.

        Args:
            arm: Name of the arm.
            batch: Requests.
            context: Tokens of each before it writes.
            stream: Text that the contexts are cut from, each from another place.
        """
        self._steer(self.arms[arm])
        self.engine.ignores_ends = True
        self._live.reset_prefix_cache()
        turned = stream * (2 + context // len(stream))
        starts = [i * len(stream) // batch for i in range(batch)]
        requests = [Request(id=i, prompt_ids=turned[start : start + context]) for i, start in enumerate(starts)]
        marks: list[tuple[float, int]] = []

        def on_progress(progress: RolloutProgress) -> None:
            if progress.running < batch and progress.finished:
                raise RuntimeError(f"A request of the cell {batch} x {context} ended before it was measured.")
            if progress.running == batch and progress.tokens >= batch:
                marks.append((progress.elapsed, progress.tokens))
                if len(marks) == CELL_STEPS:
                    raise Enough

        room = self.setup.max_model_len - context
        try:
            for _ in self.engine.generate(requests, Sampling(max_tokens=room), seed=0, on_progress=on_progress):
                pass
        except Enough:
            pass
        (start, before), (end, after) = marks[SETTLE_STEPS], marks[-1]
        steps = CELL_STEPS - 1 - SETTLE_STEPS
        found = {"tokens_per_s": (after - before) / (end - start), "step_ms": 1e3 * (end - start) / steps}
        told = self._speculated()
        return found | {name: told[name] for name in ("acceptance_length", "k_mean", "off_share") if name in told}

    def write(
        self, arm: str, sampling: Sampling, seed: int, group_size: int, at_once: int | None = None
    ) -> list[tuple[list[int], list[float]]]:
        """Tokens and log-probs of `group_size` responses to each prompt, at most `at_once` of them running together."""
        self._steer(self.arms[arm])
        self.engine.ignores_ends = False
        self._live.reset_prefix_cache()
        requests = replace(self.setup, group_size=group_size).requests()
        step = at_once or len(requests)
        found = {}
        for first in range(0, len(requests), step):
            for response in self.engine.generate(requests[first : first + step], sampling, seed=seed):
                found[response.request_id] = (list(response.token_ids), list(response.logps))
        return [found[request.id] for request in requests]

    def describe(self) -> dict[str, Any]:
        """What the engine is and holds: its settings, memory, KV cache and graphs."""
        from vllm.v1.core.kv_cache_utils import get_max_concurrency_for_kv_cache_config

        config = self._live.vllm_config
        runner = self.engine.inspect().model_runner
        cuda = torch.cuda.is_initialized()
        cache = self.engine.inspect().scheduler.kv_cache_config
        kv_tokens = int(get_max_concurrency_for_kv_cache_config(config, cache) * config.model_config.max_model_len)
        result = {
            "start_seconds": round(self.start_seconds, 1),
            "async_scheduling": bool(config.scheduler_config.async_scheduling),
            "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
            "max_num_seqs": config.scheduler_config.max_num_seqs,
            "cudagraph_mode": str(config.compilation_config.cudagraph_mode),
            "v2_runner": bool(config.use_v2_model_runner),
            "weights_gib": round(getattr(runner, "model_memory_usage", 0) / 2**30, 3),
            "kv_tokens": kv_tokens,
            "kv_bytes_per_token": round(sum(tensor.size for tensor in cache.kv_cache_tensors) / kv_tokens, 1),
            "reserved_gib": round(torch.cuda.memory_reserved() / 2**30, 3) if cuda else 0.0,
            "peak_allocated_gib": round(torch.cuda.max_memory_allocated() / 2**30, 3) if cuda else 0.0,
            "device_gib": round(torch.cuda.get_device_properties(0).total_memory / 2**30, 1) if cuda else 0.0,
        }
        if self.table:
            result["table"] = [list(entry) for entry in self.table]
        graphs = self.engine.inspect().graphs
        if graphs is not None and graphs.plan is not None:
            report = graphs.report()
            result |= {"graph_mib": dict(report.mib), "graph_seconds": dict(report.seconds)}
            result["graph_table"] = graphs.plan.table(report)
        return result

    def close(self) -> None:
        """Free the engine."""
        self.engine.close()

    # How

    @property
    def _live(self) -> Any:
        return self.engine.inspect().engine

    def _counters(self) -> Any:
        controller = self.engine.inspect().controller
        if controller is not None:
            return lambda: controller.counters
        if self.watched is not None:
            self.watched.counters = SpeculationCounters()
            return lambda: self.watched.counters
        return None

    def _speculated(self) -> dict[str, Any]:
        stats = self.engine.stats() if self.watched is None else self.watched.counters.stats()
        return {name.removeprefix("speculation/"): round(value, 5) for name, value in stats.items()}

    def _steer(self, arm: Arm) -> MemoryTrace | None:
        """Have the live engine speculate as the arm does; a selector keeps what it learned in earlier rollouts."""
        session = self.engine._session
        if session is None:
            return None
        assert arm.selector is not None
        if arm.head is not None:
            self._use_head(arm.head)
        control, steering = session.control, session.steering
        control.selector = self.selectors.setdefault(arm.name, arm.selector())
        control.strategy = OFF  # nothing is left of the arm before
        control.alarm.reset()
        texts = None
        if arm.siblings or arm.ngram:
            texts = RunningTexts(siblings=arm.siblings, ngram=arm.ngram, keeps=False)
        session.texts = steering.texts = texts
        drafter: Any = steering.drafter
        if hasattr(drafter, "_look_up"):  # the V2 runner's; the V1 runner's steering looks at its texts alone
            drafter._look_up = None if texts is None else steering.look_up
            drafter.has_head = arm.head is not None  # without one, its first pass must not be paid for
        self.engine.warm_up()  # as before the first rollout of a run
        control.trace = MemoryTrace() if arm.name == "adaptive" else None
        return control.trace

    def _use_head(self, head: str) -> None:
        if head == self.head:
            return
        is_random = head == RANDOM_HEAD
        tensors = head_tensors(self.setup.heads[0] if is_random else head)
        if is_random:
            tensors = redrawn(tensors, self.setup.seed)
        parts = self.engine.inspect()
        target, drafter = parts.model_runner.get_model(), parts.speculative_runner.drafter  # type: ignore[union-attr]
        if is_random or drafter.model.lm_head is getattr(target, "lm_head", None):  # type: ignore[union-attr]
            tensors.pop("lm_head.weight", None)
        self.engine.update_drafter(tensors.items(), version=0)
        self.head = head

    def _warm_up(self) -> None:
        """Run every strategy at every batch size, with what is compiled on first use, by a rollout with a long tail."""
        self.engine.ignores_ends = True
        lengths = warm_up_lengths(self.setup.num_requests, self.setup.max_tokens)
        for _ in self.engine.generate(self.setup.requests(lengths), self.setup.sampling, seed=1):
            pass


def warm_up_lengths(num_requests: int, max_tokens: int) -> list[int]:
    """Lengths under which a rollout spends `WARM_UP_TOKENS` in each range of batch sizes, down to a single request."""
    tokens = min(WARM_UP_TOKENS, max_tokens // len(EDGES))
    bins = np.interp(range(1, num_requests + 1), EDGES, range(len(EDGES)))  # request n ends while n are running
    return [round(tokens * (len(EDGES) - place)) for place in bins]
