"""Watches a rollout step by step and boils it down to the numbers that are reported. Pure."""

from __future__ import annotations

import statistics
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from tlt_lightning.engine import RolloutProgress
from tlt_lightning.metrics import tail_share
from tlt_lightning.speculation.counters import SpeculationCounters
from tlt_lightning.speculation.strategy import Strategy

EDGES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Smallest batch of each bin that step times are gathered in."""

PHASES = 8
"""Parts of a rollout, by the length of its longest response, that acceptance is counted in."""

CURVE_POINTS = 120
NUM_SLOWEST = 5
"""Steps that are kept one by one, to see what a stalled rollout waited for."""


@dataclass(frozen=True, slots=True)
class Row:
    """The state after one engine step: seconds, requests running and waiting, response tokens written so far."""

    elapsed: float
    running: int
    waiting: int
    tokens: int


class StepRecorder:
    """Called after each engine step; takes microseconds.

    Args:
        longest: Tokens of the longest response to come, which tells how far the rollout is.
        counters: The engine's counts of drafts, if it drafts.
    """

    def __init__(self, longest: int, counters: Callable[[], SpeculationCounters] | None = None) -> None:
        self.rows: list[Row] = []
        self.phases: list[tuple[dict[int, int], dict[int, int]]] = []  # drafted, accepted by position, so far
        self._longest, self._counters = longest, counters

    def __call__(self, progress: RolloutProgress) -> None:
        """Take in one step."""
        self.rows.append(Row(progress.elapsed, progress.running, progress.waiting, progress.tokens))
        if self._counters is not None and progress.longest >= self._longest * (len(self.phases) + 1) / PHASES:
            self.snap()

    def snap(self) -> None:
        """End a phase."""
        if self._counters is not None:
            counters = self._counters()
            self.phases.append((dict(counters.drafted_at), dict(counters.accepted_at)))


class WatchedScheduler:
    """Counts what a scheduler that nobody steers drafts and emits.

    Args:
        scheduler: vLLM's.
    """

    def __init__(self, scheduler: Any) -> None:
        self.counters = SpeculationCounters()
        self._update = scheduler.update_from_output
        scheduler.update_from_output = self.update

    def update(self, output: Any, result: Any) -> Any:
        """Count a step, then let the scheduler take it in."""
        drafted, emitted = [], []
        for request_id, num_scheduled in output.num_scheduled_tokens.items():
            index = result.req_id_to_index.get(request_id)
            tokens = result.sampled_token_ids[index] if result.sampled_token_ids and index is not None else ()
            num_drafts = len(output.scheduled_spec_decode_tokens.get(request_id, ()))
            if len(tokens) and num_scheduled == 1 + num_drafts:
                drafted.append(num_drafts)
                emitted.append(len(tokens))
        if drafted:
            self.counters.count_step(Strategy(max(drafted)), drafted, emitted)
        return self._update(output, result)


def summarize(rows: Sequence[Row], num_requests: int, seconds: float, tokens: int) -> dict[str, Any]:
    """The numbers of a rollout.

    Args:
        rows: Its steps.
        num_requests: Its requests.
        seconds: Its makespan, from the first request handed over to the last response taken.
        tokens: Response tokens written.
    """
    start = next((i for i, row in enumerate(rows) if row.waiting == 0 and row.tokens >= num_requests), len(rows) - 1)
    every = max(1, len(rows) // CURVE_POINTS)
    return {
        "seconds": round(seconds, 4),
        "tokens": tokens,
        "tokens_per_s": round(tokens / seconds, 1),
        "tail_share": round(tail_share([(row.elapsed, row.running + row.waiting) for row in rows], num_requests), 4),
        "steps": len(rows),
        "prefill_seconds": round(rows[start].elapsed, 4),
        "most_running": max(row.running for row in rows),
        "preempted": max((row.waiting for row in rows[start:]), default=0),
        "by_batch": by_batch(rows[start:]),
        "slowest": slowest(rows[start:]),
        "curve": [[round(row.elapsed, 4), row.running] for row in rows[::every]],
    }


def stall_seconds(run: dict[str, Any]) -> float:
    """Seconds of a summarized rollout beyond its prompts and the medians of its steps: compilations, pauses.

    A little is always left, as batches of a bin differ; below zero it says nothing.
    """
    steps = sum(count * milliseconds for _, count, milliseconds, _ in run["by_batch"]) / 1e3
    return max(0.0, run["seconds"] - run["prefill_seconds"] - steps)


def slowest(rows: Sequence[Row]) -> list[list[float]]:
    """[seconds since the start, requests running, milliseconds] of the slowest steps, the slowest first."""
    steps = [
        [round(after.elapsed, 3), before.running, round(1e3 * (after.elapsed - before.elapsed), 2)]
        for before, after in pairwise(rows)
    ]
    return sorted(steps, key=lambda step: step[2], reverse=True)[:NUM_SLOWEST]


def by_batch(rows: Sequence[Row]) -> list[list[float]]:
    """For each range of batch sizes met: mean batch, steps, median milliseconds, tokens per request and step."""
    bins: dict[int, list[tuple[int, float, int]]] = {}
    for before, after in pairwise(rows):
        if before.running:
            step = (before.running, after.elapsed - before.elapsed, after.tokens - before.tokens)
            bins.setdefault(bisect_right(EDGES, before.running), []).append(step)
    return [
        [
            round(statistics.fmean(batch for batch, _, _ in steps), 2),
            len(steps),
            round(1e3 * statistics.median(seconds for _, seconds, _ in steps), 4),
            round(sum(tokens for _, _, tokens in steps) / sum(batch for batch, _, _ in steps), 4),
        ]
        for _, steps in sorted(bins.items())
    ]


def acceptance_by_phase(phases: Sequence[tuple[dict[int, int], dict[int, int]]]) -> list[list[float]]:
    """For each phase, the chance of each position's draft given that those before it were accepted."""
    chances, before = [], ({}, {})
    for drafted, accepted in phases:
        reached = drafted.get(0, 0) - before[0].get(0, 0)
        found = []
        for position in sorted(drafted):
            kept = accepted.get(position, 0) - before[1].get(position, 0)
            found.append(round(kept / reached, 4) if reached else 0.0)
            reached = kept
        if drafted.get(0, 0) > before[0].get(0, 0):
            chances.append(found)
            before = (drafted, accepted)
    return chances
