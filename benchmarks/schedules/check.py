"""Compare what is simulated with what was measured: rollouts of plain engines under schedules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.common.results import table
from benchmarks.end_to_end.run import Run, read_runs
from benchmarks.schedules.cases import groups_of
from benchmarks.schedules.costs import plain_cost
from benchmarks.schedules.worker import Array, Worker
from tlt_lightning.metrics import IterationLog
from tlt_lightning.schedules import PartialRollout, RolloutSchedule, SynchronousSchedule, TailBatching

NUM_GROUPS = 32
"""Groups that an iteration learns from, on all workers."""


class Measured(NamedTuple):
    """Names a measured arm with a schedule; `plain` is in the same results."""

    results: str
    arm: str
    schedule: RolloutSchedule
    workers: int


MEASURED = (
    Measured("25m_schedules", "plain+tail", TailBatching(0.25), 1),
    Measured("25m_rising", "plain+partial", PartialRollout(0.5), 1),
    Measured("25m_two_gpus", "plain+partial", PartialRollout(0.5), 2),
)


class Found(NamedTuple):
    """Means over iterations, the first one left out."""

    seconds: float
    relative: float
    tokens_written: float
    tokens_thrown_away: float


def check(folder: Path, measured: Measured, *, repeats: int) -> dict[str, Any]:
    """Return what was measured beside what is simulated, and the fit of the step times.

    An iteration draws its groups from those that the plain run wrote in it, as the policy learns alike. Step times are
    fitted to that run's rollouts. With several workers, the lengths are rank zero's.
    """
    runs = {run.arm: run for run in read_runs(folder / f"end_to_end_{measured.results}.json")}
    plain, scheduled = runs["plain"], runs[measured.arm]
    cost, fit = plain_cost(plain)
    lengths = [groups_of([row["lengths"]]) for row in plain.iterations]

    def simulated(schedule: RolloutSchedule, num_iterations: int) -> Found:
        def draw(choose: Any, iteration: int) -> Sequence[int]:
            return choose.choice(lengths[iteration])

        found = [simulate(schedule, measured.workers, draw, cost, num_iterations, seed) for seed in range(repeats)]
        return Found(*np.mean(found, axis=0).tolist())

    num_iterations = min(len(lengths), len(scheduled.iterations))
    base, told = (means_of(run, num_iterations, measured.workers) for run in (plain, scheduled))
    synchronous, found = (simulated(each, num_iterations) for each in (SynchronousSchedule(), measured.schedule))
    return {
        **{"results": measured.results, "arm": measured.arm, "workers": measured.workers, "fit": fit},
        "measured": told._replace(relative=told.seconds / base.seconds)._asdict(),
        "simulated": found._replace(relative=found.seconds / synchronous.seconds)._asdict(),
    }


def simulate(
    schedule: RolloutSchedule,
    num_workers: int,
    draw_group: Callable[[Any, int], Sequence[int]],
    cost: Array,
    num_iterations: int,
    seed: int,
) -> Found:
    """Simulate a run whose workers wait for the last of them in each iteration."""
    wanted = NUM_GROUPS // num_workers
    workers = [Worker(schedule, wanted, draw_group, seed * num_workers + rank) for rank in range(num_workers)]
    rows = []
    for iteration in range(num_iterations):
        log = IterationLog()
        rollouts = [worker.iterate(iteration, log) for worker in workers]
        seconds = max(float(each.tokens @ cost[each.running]) for each in rollouts) / 1e3
        rows.append([seconds, sum(each.written for each in rollouts), thrown_away(dict(log_values(log)))])
    seconds, written, thrown = np.mean(rows[1:], axis=0)
    return Found(seconds, 1.0, written, thrown)


def means_of(run: Run, num_iterations: int, num_workers: int) -> Found:
    """Return what a run measured; a worker waits for the last one in `time/idle`."""
    rows = []
    for row in run.iterations[1:num_iterations]:
        metrics = row["metrics"]
        seconds, idle = metrics["rollout/seconds"], metrics.get("time/idle", 0.0)
        written = metrics["rollout/tokens_per_s"] * seconds * num_workers
        rows.append([seconds + idle, written, thrown_away(metrics)])
    seconds, written, thrown = np.mean(rows, axis=0)
    return Found(seconds, 1.0, written, thrown)


def thrown_away(metrics: Mapping[str, float]) -> float:
    """Return the tokens that an iteration threw away."""
    return metrics.get("schedule/tokens_thrown_away", 0.0)


def log_values(log: IterationLog) -> dict[str, float]:
    """Return the numbers of a log by name."""
    return {name: value for name, (_, value) in log.read().items()}


def report_check(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return how far the simulator is from what was measured."""
    lines = [
        "## The simulator's error",
        "",
        "Beside runs of `end_to_end`, measured / simulated, means over iterations after the first. Step times are "
        "fitted to their plain runs as a + b n, with the fit's mean and largest error. Relative: seconds of a rollout, "
        "until the last worker ends, over the synchronous schedule's.",
        "",
    ]
    header = ["results", "arm", "workers", "a, ms", "b, us", "error", "relative"]
    cells = []
    for row in rows:
        fit, kinds = row["fit"], (row["measured"], row["simulated"])
        error = f"{fit['mean_error']:.1%}, {fit['worst_error']:.1%}"
        shown = [f"`{row['results']}`", f"`{row['arm']}`", row["workers"], fit["a_ms"], 1e3 * fit["b_ms"], error]
        pairs = [" / ".join(f"{kind[name]:.2f}" for kind in kinds) for name in ("relative", "seconds")]
        counts = [
            " / ".join(f"{kind[name]:,.0f}" for kind in kinds) for name in ("tokens_written", "tokens_thrown_away")
        ]
        cells.append([*shown, *pairs, *counts])
    return lines + table([*header, "seconds", "tokens written", "tokens thrown away"], cells)
