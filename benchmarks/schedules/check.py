"""Compare what is simulated with what was measured: rollouts of plain engines under schedules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.common.results import table
from benchmarks.end_to_end.run import Run, read_runs
from benchmarks.schedules.cases import groups_of
from benchmarks.schedules.costs import plain_cost
from benchmarks.schedules.worker import Array, Group, Worker, seconds_of
from tlt_lightning.metrics import IterationLog
from tlt_lightning.schedules import PartialRollout, RolloutSchedule, SynchronousSchedule


class Measured(NamedTuple):
    """Names a measured arm with a schedule; `plain` with the same seed is in the same results."""

    results: str
    arm: str
    schedule: RolloutSchedule
    workers: int
    seed: int = 0


MEASURED = (
    Measured("25m_rising", "plain+partial", PartialRollout(0.5), 1),
    Measured("25m_seeds", "plain+partial", PartialRollout(0.5), 1, seed=1),
    Measured("25m_two_gpus", "plain+partial", PartialRollout(0.5), 2),
    Measured("25m_forty", "plain+partial", PartialRollout(0.5), 1),
    Measured("7b_schedules", "plain+partial", PartialRollout(0.5), 1),
)


class Found(NamedTuple):
    """Means over iterations, the first one left out."""

    seconds: float
    tokens_written: float


def check(folder: Path, measured: Measured, *, repeats: int) -> dict[str, Any]:
    """Return what was measured beside what is simulated, and the fit of the step times.

    An iteration draws its groups from those that the plain run wrote in it, as the policy learns alike. Step times are
    fitted to that run's rollouts. With several workers, the lengths are rank zero's.
    """
    known = read_runs(folder / f"end_to_end_{measured.results}.json")
    runs = {run.arm: run for run in known if run.seed == measured.seed}
    plain, scheduled = runs["plain"], runs[measured.arm]
    cost, fit = plain_cost(plain)
    num_iterations = min(len(plain.iterations), len(scheduled.iterations))
    lengths = [groups_of([row["lengths"]]) for row in plain.iterations[:num_iterations]]
    told = {run.arm: means_of(run, num_iterations, measured.workers) for run in (plain, scheduled)}
    schedules: dict[str, RolloutSchedule] = {"plain": SynchronousSchedule(), measured.arm: measured.schedule}
    given = (measured.workers, lengths, cost, repeats)
    found = {arm: simulate(schedule, *given) for arm, schedule in schedules.items()}
    kinds = {
        kind: each[measured.arm]._asdict() | {"relative": each[measured.arm].seconds / each["plain"].seconds}
        for kind, each in {"measured": told, "simulated": found}.items()
    }
    return {"results": measured.results, "arm": measured.arm, "workers": measured.workers, "fit": fit, **kinds}


def simulate(
    schedule: RolloutSchedule, num_workers: int, lengths: Sequence[Sequence[Group]], cost: Array, repeats: int
) -> Found:
    """Simulate runs whose workers draw, by iteration, as many groups as `lengths` has from them."""
    wanted, rows = len(lengths[0]), list[list[float]]()
    for seed in range(0, repeats * num_workers, num_workers):
        workers = [
            Worker(schedule, wanted, lambda draw, at: (draw.choice(lengths[at]), 0.0), seed + rank)
            for rank in range(num_workers)
        ]
        for iteration in range(len(lengths)):
            rollouts = [worker.iterate(iteration, IterationLog()) for worker in workers]
            if iteration:
                rows.append([seconds_of(rollouts, cost), sum(each.written for each in rollouts)])
    return Found(*np.mean(rows, axis=0).tolist())


def means_of(run: Run, num_iterations: int, num_workers: int) -> Found:
    """Return what a run measured; a worker waits for the last one in `time/idle`."""
    rows = []
    for row in run.iterations[1:num_iterations]:
        metrics = row["metrics"]
        seconds, idle = metrics["rollout/seconds"], metrics.get("time/idle", 0.0)
        written = metrics["rollout/tokens_per_s"] * seconds * num_workers
        rows.append([seconds + idle, written])
    return Found(*np.mean(rows, axis=0).tolist())


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
        cells.append([*shown, *pairs, " / ".join(f"{kind['tokens_written']:,.0f}" for kind in kinds)])
    return lines + table([*header, "seconds", "tokens written"], cells)
