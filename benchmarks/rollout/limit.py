"""Model how fast a rollout could be at the measured step times and the measured acceptance.

A rollout is its prompts' seconds plus a sum over steps. A step at batch b that verifies K drafts takes T(b, K): the
median of the steps that the fixed arms (K > 0) and the plain engine (K = 0) took at such batches, in the same run.
Contexts need no coefficient of their own: lengths are replayed, so each batch size is met at the contexts at which it
was measured. A position's draft is accepted with the chance that the longest fixed draft measured, given the positions
before it. The limit chooses for every step the K with the most tokens per second, knowing T and the chances, switches
for nothing, and is averaged over five draws of luck. (It looks no step ahead, which costs it 1% at most.) What the
model makes of the plain and the fixed arms is reported beside what they took: that is its error.
"""

from __future__ import annotations

import statistics
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from benchmarks.rollout.steps import EDGES
from benchmarks.simulation.selector_regret import DRAFT_LENGTHS, Oracle
from benchmarks.simulation.simulator import RolloutSimulator, StepCosts, Workload, constant
from tlt_lightning.speculation import FixedSelector, SelectorState

Runs = Sequence[dict[str, Any]]
SEEDS = range(5)
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


def measured_costs(arms: Mapping[str, Runs]) -> StepCosts:
    """Return a table of the step times of the arms "plain" and "K=<length>".

    Raises:
        ValueError: One of them was not measured.
    """
    names = ["plain", *(f"K={k}" for k in DRAFT_LENGTHS)]
    if missing := [name for name in names if not arms.get(name)]:
        raise ValueError(f"`arms` lacks runs of {missing}; the model needs the plain arm and every fixed one.")
    curves = {name: step_curve(arms[name]) for name in names}
    most = round(max(points[-1] for points, _ in curves.values()))
    batches = sorted({*(edge for edge in EDGES if edge < most), most, 2 * most})  # the last slope is flat
    plain, *speculative = (np.interp(batches, *curves[name]).tolist() for name in names)
    rows = tuple(zip(*speculative, strict=True))
    free = {"context_token": 0.0, "catch_up_fixed": 0.0, "catch_up_token": 0.0}
    return StepCosts(
        batch_sizes=tuple(batches), plain=tuple(plain), num_draft_tokens=DRAFT_LENGTHS, speculative=rows, **free
    )


def conditional_chances(run: Mapping[str, Any]) -> list[float]:
    """Return the chance of each position's draft given that those before it were accepted."""
    kept = [1.0, *(run[f"acceptance_rate_pos_{k}"] for k in range(1, max(DRAFT_LENGTHS) + 1))]
    return [after / before if before else 0.0 for before, after in pairwise(kept)]


def model(arms: Mapping[str, Runs], lengths: Sequence[int]) -> dict[str, Any]:
    """Return the limit, the modelled times of its own arms, and the best K by batch size.

    `arms` are runs of the plain and the fixed arms on the recorded `lengths`.
    """
    costs = measured_costs(arms)
    chances = np.mean([conditional_chances(run) for run in arms[f"K={max(DRAFT_LENGTHS)}"]], axis=0)
    acceptance = {"learned": constant(*chances.tolist())}
    workload = Workload(acceptance=acceptance, num_requests=len(lengths), recorded=tuple(lengths))
    prompts = statistics.median(run["prefill_seconds"] for run in arms["plain"])
    modelled: dict[str, list[float]] = {}
    for seed in SEEDS:
        simulator = RolloutSimulator(replace(workload, seed=seed), costs)
        selectors = {"limit": Oracle(simulator), "plain": FixedSelector(0)}
        selectors |= {f"K={k}": FixedSelector(k) for k in DRAFT_LENGTHS}
        for name, selector in selectors.items():
            modelled.setdefault(name, []).append(simulator.run(selector).makespan + prompts)
    seconds = {name: statistics.fmean(values) for name, values in modelled.items()}
    return {
        "limit_seconds": seconds.pop("limit"),
        "modelled_seconds": seconds,
        "measured_seconds": {name: statistics.median(run["seconds"] for run in arms[name]) for name in seconds},
        "step_ms": [
            list(row) for row in zip(costs.batch_sizes, costs.plain, *zip(*costs.speculative, strict=True), strict=True)
        ],
        "best_k": best_by_batch(simulator, len(lengths)),
    }


def best_by_batch(simulator: RolloutSimulator, num_requests: int) -> list[list[int]]:
    """Return [first batch, last batch, best K] by range of batch sizes, as vLLM's table."""
    ranges: list[list[int]] = []
    for first, after in pairwise((*(edge for edge in EDGES if edge <= num_requests), num_requests + 1)):
        best = Oracle(simulator).select(SelectorState(first)).num_draft_tokens
        if ranges and ranges[-1][2] == best:
            ranges[-1][1] = after - 1
        else:
            ranges.append([first, after - 1, best])
    return ranges
