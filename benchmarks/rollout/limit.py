"""Model how fast a rollout could be at the measured step times and the measured acceptance.

With N responses of lengths l_1 <= ... <= l_N that advance together, l_i - l_(i-1) tokens of each response that still
runs are written while n = N - i + 1 run, so a rollout that verifies K drafts in every step takes

    prompts + sum over i of (l_i - l_(i-1)) T(n, K) / E(K).

T(n, K) is the median of the steps that a fixed arm (K > 0) or the plain engine (K = 0) took at such batches, in the
same run. Contexts need no coefficient of their own: lengths are replayed, so each batch size is met at the contexts at
which it was measured. E(K) is the tokens of a step, 1 and the shares of drafts that were kept at the first K positions
of the longest fixed draft. The limit takes the best K at each n and switches for nothing. Left out: responses part by
luck, and drafts beyond an end are lost; that is at most 1.2% of the rollouts in `results/rollout_*.json`. What the
model makes of the plain and the fixed arms is reported beside what they took: that is its error.
"""

from __future__ import annotations

import statistics
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from benchmarks.rollout.arms import KS
from benchmarks.rollout.steps import EDGES

Runs = Sequence[dict[str, Any]]
NAMES = {0: "plain"} | {k: f"K={k}" for k in KS}
"""Arms that the model is made of, by their K."""
LEAST_STEPS = 4
"""Steps that the median of a bin needs to be believed."""


def step_curve(runs: Runs) -> tuple[list[float], list[float]]:
    """Return batch sizes and milliseconds per step of one arm, the median over its runs.

    Raises:
        ValueError: No batch size was met often enough.
    """
    found: dict[int, list[tuple[float, float]]] = {}
    for run in runs:
        for batch, steps, milliseconds, _ in run["by_batch"]:
            if steps >= LEAST_STEPS or len(run["by_batch"]) == 1:
                found.setdefault(bisect_right(EDGES, batch), []).append((batch, milliseconds))
    points = sorted(
        tuple(statistics.median(column) for column in zip(*values, strict=True)) for values in found.values()
    )
    if not points:
        raise ValueError("The rollouts are too short to tell what a step costs.")
    return [batch for batch, _ in points], [milliseconds for _, milliseconds in points]


def tokens_per_step(runs: Runs, num_draft_tokens: int) -> float:
    """Return the mean tokens of a step that verifies so many drafts, by runs of a longer draft."""
    positions = range(1, num_draft_tokens + 1)
    return 1 + sum(statistics.fmean(run[f"acceptance_rate_pos_{k}"] for run in runs) for k in positions)


def model(arms: Mapping[str, Runs], lengths: Sequence[int]) -> dict[str, Any]:
    """Return the limit, the modelled times of its own arms, and the best K by batch size.

    `arms` are runs of the plain and the fixed arms on the recorded `lengths`.

    Raises:
        ValueError: One of the arms was not measured.
    """
    if missing := [name for name in NAMES.values() if not arms.get(name)]:
        raise ValueError(f"`arms` lacks runs of {missing}; the model needs the plain arm and every fixed one.")
    curves = {k: step_curve(arms[name]) for k, name in NAMES.items()}
    tokens = {k: tokens_per_step(arms[NAMES[max(KS)]], k) for k in NAMES}
    running = np.arange(len(lengths), 0, -1)
    written = np.diff(np.sort(lengths), prepend=0)
    seconds = {k: written * np.interp(running, *curves[k]) / tokens[k] / 1e3 for k in NAMES}
    prompts = statistics.median(run["prefill_seconds"] for run in arms["plain"])
    batches = [edge for edge in EDGES if edge <= len(lengths)]
    step_ms = np.array([np.interp(batches, *curves[k]) for k in NAMES])  # (K, batch size)
    best = np.argmin(step_ms / np.array(list(tokens.values()))[:, None], axis=0)
    return {
        "limit_seconds": prompts + float(np.min(list(seconds.values()), axis=0).sum()),
        "modelled_seconds": {NAMES[k]: prompts + float(each.sum()) for k, each in seconds.items()},
        "measured_seconds": {name: statistics.median(run["seconds"] for run in arms[name]) for name in NAMES.values()},
        "step_ms": [[batch, *row] for batch, row in zip(batches, step_ms.T.tolist(), strict=True)],
        "best_k": ranges_of(batches, [list(NAMES)[index] for index in best], len(lengths)),
    }


def ranges_of(batches: Sequence[int], best: Sequence[int], num_requests: int) -> list[list[int]]:
    """Return [first batch, last batch, best K] by range of batch sizes, as vLLM's table."""
    ranges: list[list[int]] = []
    for (first, after), k in zip(pairwise((*batches, num_requests + 1)), best, strict=True):
        if ranges and ranges[-1][2] == k:
            ranges[-1][1] = after - 1
        else:
            ranges.append([first, after - 1, k])
    return ranges
