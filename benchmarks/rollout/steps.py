"""Watch a rollout step by step and sum it up. Pure."""

from __future__ import annotations

import statistics
from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from tlt_lightning.engine import RolloutProgress
from tlt_lightning.metrics.rollouts import tail_share
from tlt_lightning.speculation.counters import arm_name

EDGES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Smallest batch of each bin that step times are gathered in."""


class Row(NamedTuple):
    """Holds the state after an engine step: seconds, requests, tokens so far, strategy."""

    elapsed: float
    running: int
    waiting: int
    tokens: int
    strategy: str = "off"


def row_of(progress: RolloutProgress) -> Row:
    """Return the row of an engine step."""
    arm = arm_name(progress.strategy)
    return Row(progress.elapsed, progress.running, progress.waiting, progress.tokens, arm)


def summarize(rows: Sequence[Row], num_requests: int, seconds: float, tokens: int) -> dict[str, Any]:
    """Return the numbers of a rollout with steps `rows`.

    `seconds` is its makespan, from the first request handed over to the last response taken.
    """
    start = next((i for i, row in enumerate(rows) if row.waiting == 0 and row.tokens >= num_requests), len(rows) - 1)
    found: dict[str, Any] = {
        "seconds": round(seconds, 4),
        "tokens": tokens,
        "tokens_per_s": round(tokens / seconds, 1),
        "tail_share": round(tail_share([(row.elapsed, row.running + row.waiting) for row in rows], num_requests), 4),
        "steps": len(rows),
        "prefill_seconds": round(rows[start].elapsed, 4),
        "preempted": max((row.waiting for row in rows[start:]), default=0),
        "by_batch": by_batch(rows[start:]),
    }
    in_steps = sum(count * milliseconds for _, count, milliseconds, _ in found["by_batch"]) / 1e3
    # Beyond the prompts and the medians of the steps: compilations, pauses. A little is always left.
    found["stall_seconds"] = round(max(0.0, seconds - found["prefill_seconds"] - in_steps), 3)
    return found | {"rows": [tuple(row) for row in rows]}


def by_batch(rows: Sequence[Row]) -> list[list[float]]:
    """Return steps, mean batch, median ms and acceptance length by range of batch sizes."""
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
