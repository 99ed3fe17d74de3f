"""Tell how long recorded rollouts take on the same GPUs as many engines or few, from measured step times. No GPU.

    python -m benchmarks makespan --steps results/step_time_tp1_7b.json results/step_time_tp4_7b.json

Each file is of `step_time` at one shape and one number of GPUs an engine. Engines get equal shares of an iteration's
groups, as they were recorded, and a step takes as long as was measured at as many requests, between batch sizes in
proportion. Without a head K is 0. With one, each batch size has its best K, and K drafts are a p (1 - p^K) / (1 - p)
more tokens a step, each accepted with probability p. Reading prompts counts nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.common.arguments import RESULTS, parser_of
from benchmarks.common.results import about, heading, save, table
from benchmarks.end_to_end.run import read_runs, recorded_lengths

LENGTHS = RESULTS / "end_to_end_25m_schedules.json"
PART = "bucketed"

Array = NDArray[np.float64]


def costs_of(step_ms: Mapping[str, float], acceptance: float) -> tuple[Array, Array]:
    """Return milliseconds a token of a request by requests that run, without drafts and at the best K.

    Args:
        step_ms: Milliseconds a step under "batch,K". A K is chosen at no larger batch than it was measured at.
        acceptance: Probability that a draft is accepted if all before it are.
    """
    cells = {tuple(map(int, cell.split(","))): value for cell, value in step_ms.items()}
    running = np.arange(max(batch for batch, _ in cells) + 1)
    costs = {}
    for k in {k for _, k in cells}:
        batches, values = zip(*sorted((batch, value) for (batch, of), value in cells.items() if of == k), strict=True)
        tokens = sum(acceptance**place for place in range(k + 1))
        costs[k] = np.where(running > batches[-1], np.inf, np.interp(running, batches, values)) / tokens
    return costs[0], np.min(list(costs.values()), axis=0)


def seconds_of(lengths: Sequence[int] | Array, cost: Array) -> float:
    """Return the seconds in which an engine writes responses of these lengths that begin at once."""
    ordered = np.sort(lengths)
    return float(np.diff(ordered, prepend=0) @ cost[np.arange(len(ordered), 0, -1)]) / 1e3


def makespans(iterations: Sequence[Sequence[int]], num_engines: int, cost: Array) -> tuple[float, float]:
    """Return the mean seconds until the last engine is done, and the share of their time that engines wait."""
    ends = [[seconds_of(share, cost) for share in np.split(np.array(each), num_engines)] for each in iterations]
    return fmean(map(max, ends)), 1 - fmean(map(fmean, ends)) / fmean(map(max, ends))


def main(arguments: Sequence[str]) -> None:
    """Compute all arrangements of the files, and write `makespan.json` and `.md`."""
    parser = parser_of(__doc__)
    parser.add_argument("--steps", nargs="+", type=Path, required=True, help="results of `step_time`")
    parser.add_argument("--gpus", type=int, default=4, help="of all engines together")
    parser.add_argument("--lengths", type=Path, default=LENGTHS, help="results of `end_to_end` that recorded lengths")
    parser.add_argument("--responses", type=int, default=128, help="of an iteration, the first")
    parser.add_argument("--acceptance", type=float, default=0.8, help="of a draft whose predecessors were accepted")
    args = parser.parse_args(arguments)
    iterations = [each[: args.responses] for each in recorded_lengths(read_runs(args.lengths)) or []]
    rows: list[list[Any]] = []
    for path in args.steps:
        found = json.loads(path.read_text())
        num_engines = args.gpus // found["tensor_parallel"]
        alone, drafting = costs_of(found[PART]["step_ms"], args.acceptance)
        row = [found["about"]["size"], f"{num_engines} x TP {found['tensor_parallel']}"]
        for cost in (alone, drafting):
            seconds, idle = makespans(iterations, num_engines, cost)
            row += [seconds, f"{idle:.0%}"]
        rows.append(row)
    record = about(f"{args.gpus} GPUs", args.note, args.seed, on_cpu=True)
    most = max(map(max, iterations))
    lead = (
        f"Seconds of a rollout of {args.responses} responses, computed from measured steps: means over "
        f"{len(iterations)} recorded iterations of at most {most:,} tokens. Drafts are accepted with probability "
        f"{args.acceptance}. Idle: the share of engines' time in which they wait for the last one."
    )
    header = ["policy", "engines", "no head, s", "idle", "head, s", "idle"]
    lines = [*heading("Makespan", record), lead, "", *table(header, rows)]
    save(args.out / "makespan", {"about": record, "rows": rows}, lines)
    print("\n".join(lines))
