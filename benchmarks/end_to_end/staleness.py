"""Compare what is learned from texts of different age, and from what their ratio is clipped against.

    python -m benchmarks staleness

The quickstart's policy with few prompts an iteration learns under the synchronous schedule, under partial rollouts, and
under asynchronous rollouts of several bounds, clipped against the policy that wrote (`behaviour`) and decoupled
(`old`). Held-out accuracy is compared at equal iterations and at equal tokens learned from, as means over the seeds.
Each run is one of the command line, in `outputs/learning/staleness_<arm>_<seed>`; `--tiny` runs one iteration of each
arm.
"""

from __future__ import annotations

import itertools
import statistics
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from benchmarks.common.arguments import parser_of
from benchmarks.common.results import about, heading, save, table
from benchmarks.end_to_end.learning import fit, picture, read_run

Run = Mapping[str, Any]
Curve = Sequence[tuple[float, float]]

BOUNDS = (1, 2, 4)
THIRDS = 3
MEASURED = {
    "age": "schedule/age",
    "effective sample": "mismatch/effective_sample_size",
    "clipped": "train/clip_fraction",
    "entropy": "train/entropy",
}
PARTIAL = "recipes/partial_rollout.yaml"
OBJECTIVE = "--model.objective.class_path=GRPO,--model.objective.init_args.proximal"


def arms() -> dict[str, str]:
    """Return the overlays of each arm, as those of `python -m benchmarks learning`."""
    bounded = {n: f"recipes/async.yaml,--data.schedule.init_args.max_staleness={n}" for n in BOUNDS}
    return {
        "synchronous": "",
        "partial, old": PARTIAL,
        "partial, behaviour": f"{PARTIAL},{OBJECTIVE}=BehaviourPolicy",
        **{f"async {n}, behaviour": overlays for n, overlays in bounded.items()},
        **{f"async {n}, old": f"{overlays},{OBJECTIVE}=OldPolicy" for n, overlays in bounded.items()},
    }


def main(arguments: list[str]) -> None:
    """Run every arm and seed, and write the results after each run."""
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--iterations", type=int, default=30)
    parser.add_argument("--prompts", type=int, default=8, help="of an iteration, with 8 responses each")
    parser.add_argument("--max-tokens", type=int, default=300, help="of a response; the recipe's is 720")
    parser.add_argument("--arms", nargs="+", default=list(arms()), choices=list(arms()), metavar="ARM")
    parser.add_argument("--at-once", type=int, default=1, help="runs side by side")
    args = parser.parse_args(arguments)
    options = [f"--data.prompts_per_iteration={args.prompts}", f"--data.sampling.max_tokens={args.max_tokens}"]
    every = max(1, args.iterations // THIRDS)
    options += [f"--trainer.max_epochs={args.iterations}", f"--trainer.check_val_every_n_epoch={every}"]
    runs: list[dict[str, Any]] = []
    with ThreadPoolExecutor(args.at_once) as pool:
        cases = list(itertools.product(args.seeds, args.arms))  # all arms of a seed first
        given = [["recipes/quickstart.yaml", *filter(None, arms()[arm].split(",")), *options] for _, arm in cases]
        folders = [
            pool.submit(fit, "staleness", arm.replace(", ", "_").replace(" ", "_"), overlays, seed, args.tiny)
            for (seed, arm), overlays in zip(cases, given, strict=True)
        ]
        for (seed, arm), future in zip(cases, folders, strict=True):
            folder, failed = future.result()
            if failed:
                raise SystemExit(f"Arm {arm!r}, seed {seed}, failed: {failed}")
            runs.append({"arm": arm, **read_run(folder), "seed": seed})
            record = {**about("quickstart", args.note, args.seed, on_cpu=True), "runs": runs}
            save(args.out / "staleness", record, [*heading("Staleness", record), *report(runs)])
            picture(runs, args.out / "staleness.png")


def report(runs: Sequence[Run]) -> list[str]:
    """Return the tables: held-out accuracy by iteration and by token, and how old and how useful the text was."""
    by_iteration = [run["curves"]["val/accuracy"] for run in runs]
    by_token = [over_tokens(run) for run in runs]
    rows = [
        [arm, *(late_mean([run for run in runs if run["arm"] == arm], metric) for metric in MEASURED.values())]
        for arm in dict.fromkeys(run["arm"] for run in runs)
    ]
    return [
        "Held-out accuracy by iteration, mean over the seeds:",
        "",
        *table(*compared(runs, by_iteration, str)),
        "By tokens learned from, in thousands:",
        "",
        *table(*compared(runs, by_token, lambda tokens: f"{tokens / 1000:.0f}")),
        "Means over the second half of the iterations, and over the seeds:",
        "",
        *table(["arm", *MEASURED], rows),
    ]


def late_mean(runs: Sequence[Run], metric: str) -> float | None:
    """Return the mean of a metric over the second half of the iterations; None if a run has none."""
    curves = [run["curves"].get(metric, []) for run in runs]
    halves = [[value for _, value in curve[len(curve) // 2 :]] for curve in curves]
    return statistics.fmean(itertools.chain.from_iterable(halves)) if all(halves) else None


def over_tokens(run: Run) -> Curve:
    """Return held-out accuracy as (tokens learned from, value)."""
    tokens = [0.0, *itertools.accumulate(value for _, value in run["curves"]["rollout/tokens"])]
    return [(tokens[iteration], value) for iteration, value in run["curves"]["val/accuracy"]]


def at(curve: Curve, x: float) -> float:
    """Return the value of a curve at `x`, between its points by interpolation."""
    place = min(max(1, bisect_left([point for point, _ in curve], x)), len(curve) - 1)
    (left, low), (right, high) = curve[place - 1], curve[place]
    return low + (high - low) * (x - left) / (right - left)


def compared(runs: Sequence[Run], curves: Sequence[Curve], name: Callable[[float], str]) -> tuple[list[str], list[Any]]:
    """Return header and rows: the mean of each arm at four places that all curves reach, and the last by seed."""
    last = min(curve[-1][0] for curve in curves)
    places = [last * part / THIRDS for part in range(THIRDS + 1)]
    if all(isinstance(x, int) for curve in curves for x, _ in curve):
        places = [*map(round, places)]
    header = ["arm", *map(name, places), "the last, by seed"]
    rows = []
    for arm in dict.fromkeys(run["arm"] for run in runs):
        own = [curve for run, curve in zip(runs, curves, strict=True) if run["arm"] == arm]
        means = [statistics.fmean(at(curve, place) for curve in own) for place in places]
        rows.append([arm, *map("{:.3f}".format, means), ", ".join(f"{at(curve, last):.3f}" for curve in own)])
    return header, rows
