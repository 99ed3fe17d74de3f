"""How fast a rollout could be at the measured step times and the measured acceptance: the limit that arms are held to.

The model. A rollout is its prompts' seconds plus a sum over steps. A step at batch b that verifies K drafts takes
T(b, K): the median of the steps that the fixed arms (K > 0) and the plain engine (K = 0) took at such batches, in the
same run. Contexts need no coefficient of their own, because recorded lengths are replayed: each batch size is met at
the contexts at which it was measured. A request gains 1 + (accepted drafts) tokens, where a position's draft is
accepted with the chance that the longest fixed draft measured, given the positions before it, in that phase of the
rollout. The limit chooses for every step the K in {0, 1, 3, 5, 7} with the most tokens per second, knowing T and the
chances, switches for nothing, and is averaged over five draws of luck. (It looks no step ahead, which costs it 1% at
most.) What the model makes of the plain and the fixed arms is reported beside what they took: that is its error.
"""

from __future__ import annotations

import statistics
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from typing_extensions import override

from benchmarks.rollout.steps import EDGES
from benchmarks.simulation.selector_regret import DRAFT_LENGTHS, Oracle
from benchmarks.simulation.simulator import RolloutSimulator, StepCosts, Workload
from tlt_lightning.speculation import FixedSelector, SelectorState, Strategy

Runs = Sequence[dict[str, Any]]
SEEDS = range(5)
LEAST_STEPS = 4
"""Steps that the median of a bin needs to be believed."""


@dataclass(frozen=True, kw_only=True)
class RecordedWorkload(Workload):
    """A workload whose lengths are recorded ones; the seed draws the luck alone.

    Args:
        recorded: Tokens of each response.
    """

    recorded: tuple[int, ...] = ()

    @override
    def lengths(self) -> np.ndarray:
        return np.array(self.recorded, dtype=np.int64)


def step_curve(runs: Runs) -> tuple[list[float], list[float]]:
    """Batch sizes and milliseconds per step of one arm, the median over its runs.

    Raises:
        ValueError: If no batch size was met often enough.
    """
    found: dict[int, list[tuple[float, float]]] = {}
    for run in runs:
        for batch, steps, milliseconds, _ in run["by_batch"]:
            if steps < LEAST_STEPS and len(run["by_batch"]) > 1:
                continue
            found.setdefault(bisect_right(EDGES, batch), []).append((batch, milliseconds))
    points = sorted(
        (statistics.median(batch for batch, _ in values), statistics.median(ms for _, ms in values))
        for values in found.values()
    )
    if not points:
        raise ValueError("The rollouts are too short to tell what a step costs.")
    return [batch for batch, _ in points], [milliseconds for _, milliseconds in points]


def measured_costs(arms: dict[str, Runs]) -> StepCosts:
    """Step times of the plain and the fixed arms as a table.

    Args:
        arms: Their runs, under "plain" and "K=<length>".

    Raises:
        ValueError: If one of them was not measured.
    """
    names = ["plain", *(f"K={k}" for k in DRAFT_LENGTHS)]
    if missing := [name for name in names if not arms.get(name)]:
        raise ValueError(f"`arms` lacks runs of {missing}; the model needs the plain arm and every fixed one.")
    curves = {name: step_curve(arms[name]) for name in names}
    most = round(max(points[-1] for points, _ in curves.values()))
    batches = sorted({*(edge for edge in EDGES if edge < most), most, 2 * most})  # the last slope is flat
    columns = [np.interp(batches, *curves[name]) for name in names]
    return StepCosts(
        batch_sizes=tuple(batches),
        plain=tuple(columns[0].tolist()),
        num_draft_tokens=DRAFT_LENGTHS,
        speculative=tuple(tuple(float(column[row]) for column in columns[1:]) for row in range(len(batches))),
        context_token=0.0,
        catch_up_fixed=0.0,
        catch_up_token=0.0,
    )


def acceptance_of(runs: Runs) -> list[list[float]]:
    """Chances by phase and position of the longest fixed draft, the mean over its runs."""
    phases = min(len(run["acceptance_by_phase"]) for run in runs)
    if not phases:
        raise ValueError("The longest fixed draft was never verified; without its acceptance there is no model.")
    return [np.mean([run["acceptance_by_phase"][phase] for run in runs], axis=0).tolist() for phase in range(phases)]


def model(arms: dict[str, Runs], lengths: Sequence[int]) -> dict[str, Any]:
    """The limit, what the model makes of the arms it was made from, and the best K for each batch size.

    Args:
        arms: Runs of the plain and the fixed arms on the recorded lengths.
        lengths: The recorded lengths.
    """
    costs = measured_costs(arms)
    chances = acceptance_of(arms[f"K={max(DRAFT_LENGTHS)}"])
    workload = RecordedWorkload(
        acceptance={"learned": lambda progress: chances[min(int(progress * len(chances)), len(chances) - 1)]},
        num_requests=len(lengths),
        recorded=tuple(lengths),
    )
    prompts = statistics.median(run["prefill_seconds"] for run in arms["plain"])
    modelled: dict[str, list[float]] = {}
    for seed in SEEDS:
        simulator = RolloutSimulator(replace(workload, seed=seed), costs)
        selectors = {"limit": Oracle(simulator), "plain": FixedSelector(0)}
        selectors |= {f"K={k}": FixedSelector(k) for k in DRAFT_LENGTHS}
        for name, selector in selectors.items():
            if name == "plain" and seed:
                continue  # luck has no part in it
            modelled.setdefault(name, []).append(simulator.run(selector).makespan + prompts)
    measured = {name: statistics.median(run["seconds"] for run in arms[name]) for name in modelled if name != "limit"}
    seconds = {name: statistics.fmean(values) for name, values in modelled.items()}
    return {
        "limit_seconds": seconds.pop("limit"),
        "modelled_seconds": seconds,
        "measured_seconds": measured,
        "acceptance_by_phase": chances,
        "step_ms": {
            "batch": costs.batch_sizes,
            "plain": costs.plain,
            "K": DRAFT_LENGTHS,
            "speculative": costs.speculative,
        },
        "best_k": best_by_batch(simulator, max(lengths), len(lengths)),
    }


def best_by_batch(simulator: RolloutSimulator, longest: int, num_requests: int) -> list[list[int]]:
    """[first batch, last batch, best K] on the mean chances of the rollout, in the form of vLLM's own table."""
    ranges: list[list[int]] = []
    oracle = Oracle(simulator)
    for batch in range(1, num_requests + 1):
        rates: dict[Strategy, float] = {}
        for progress in np.linspace(0, 1, 8, endpoint=False):
            simulator.progress = float(progress)
            for arm in oracle.arms(batch):
                rate = simulator.expected_rate(SelectorState(batch), arm)
                rates[arm] = rates.get(arm, 0.0) + rate
        best = max(rates, key=lambda arm: rates[arm]).num_draft_tokens
        if ranges and ranges[-1][2] == best:
            ranges[-1][1] = batch
        else:
            ranges.append([batch, batch, best])
    return merged(ranges)


def merged(ranges: Sequence[Sequence[int]], most: int = 8) -> list[list[int]]:
    """The same ranges with the shortest ones, by the ratio of their ends, joined to a neighbour until `most` are left.

    Every K of vLLM's table is captured anew, and measured step times jitter.
    """
    kept = [list(entry) for entry in ranges]
    while len(kept) > most or any(_ratio(entry) < 1.15 for entry in kept[1:]):
        if len(kept) == 1:
            break
        index = min(range(1, len(kept)), key=lambda i: _ratio(kept[i]))
        kept[index - 1][1] = kept[index][1]
        del kept[index]
        joined: list[list[int]] = []
        for entry in kept:
            if joined and joined[-1][2] == entry[2]:
                joined[-1][1] = entry[1]
            else:
                joined.append(entry)
        kept = joined
    return kept


def _ratio(entry: Sequence[int]) -> float:
    return (entry[1] + 1) / entry[0]
