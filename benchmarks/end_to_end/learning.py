"""Train a recipe on several seeds, with and without overlays, and picture reward and held-out accuracy.

    python -m benchmarks learning --recipe recipes/quickstart_smollm2.yaml
    python -m benchmarks learning --recipe A.yaml B.yaml --arms plain siblings=recipes/speculation.yaml

An overlay that begins with `--` is an option of the run instead of a file; `--arms` for 8 bit without correction:

    uncorrected=recipes/fp8.yaml,--model.objective.init_args.correction=null

Each run is one of the command line, in `outputs/learning/<recipe>_<arm>_<seed>`; `--tiny` runs one iteration of each.
Runs that fail are named in the end, below those that did not.
"""

from __future__ import annotations

import csv
import json
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.common import plots
from benchmarks.common.arguments import ROOT, parser_of
from benchmarks.common.results import about, heading, save, table
from benchmarks.common.statistics import middle

CURVES = (
    "reward/mean",
    "val/accuracy",
    "time/iteration",
    "time/rollout",
    "time/drafter",
    "rollout/length_mean",
    "rollout/length_p50",
    "rollout/length_p99",
    "rollout/length_max",
    "rollout/tokens",
    "environment/turns",
    "environment/calls",
    "environment/failed_calls",
    "schedule/age",
    "train/clip_fraction",
    "train/entropy",
    "speculation/acceptance_length",
    "speculation/learned_share",
    "drafter/acceptance_length",
    "drafter/predicted_saving_s",
    "drafter/published",
    "drafter/tokens",
    "mismatch/kl",
    "mismatch/ratio_max",
    "mismatch/truncated",
    "mismatch/effective_sample_size",
)
"""Metrics by iteration that the results keep, where a run has them."""


def main(arguments: list[str]) -> None:
    """Run every arm and seed, and write the results after each run."""
    parser = parser_of(__doc__)
    parser.add_argument("--recipe", nargs="+", required=True, help="recipe files, in the order of `-c`")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument(
        "--arms", nargs="+", default=["plain"], help="names, each with its overlays: NAME=FILE[,FILE or --OPTION=VALUE]"
    )
    parser.add_argument("--at-once", type=int, default=1, help="runs side by side, on one device")
    parser.add_argument("--reach", type=float, help="reward; say when the mean of three iterations was there")
    args = parser.parse_args(arguments)
    name, runs, failed = Path(args.recipe[-1]).stem, list[dict[str, Any]](), list[str]()
    with ThreadPoolExecutor(args.at_once) as pool:
        running = [
            (
                arm,
                seed,
                pool.submit(fit, name, arm, [*args.recipe, *filter(None, overlays.split(","))], seed, args.tiny),
            )
            for arm, _, overlays in (part.partition("=") for part in args.arms)
            for seed in args.seeds
        ]
        for arm, seed, run in running:
            folder, error = run.result()
            if error:
                failed.append(f"arm {arm!r}, seed {seed}, failed: {error}")
                continue
            runs.append({"arm": arm, **read_run(folder), "seed": seed})
            record = {**about(name, args.note, args.seed, on_cpu=False), "runs": runs, "failed": failed}
            lines = [
                *heading("Learning", record),
                *table(*rows_of(runs, args.reach)),
                *(["", *failed] if failed else []),
            ]
            save(args.out / f"learning_{name}", record, lines)
            picture(runs, args.out / f"learning_{name}.png")
    if failed:
        raise SystemExit("\n".join(failed))


def fit(name: str, arm: str, overlays: Sequence[str], seed: int, tiny: bool) -> tuple[Path, str]:
    """Do a run of the command line; return its folder, and its command if it failed."""
    folder = ROOT / f"outputs/learning/{name}_{arm}_{seed}"
    options = [part for overlay in overlays for part in ([overlay] if overlay.startswith("--") else ["-c", overlay])]
    command = [sys.executable, "-m", "tlt_lightning", "fit", *options]
    command += ["--seed_everything", str(seed), "--trainer.default_root_dir", str(folder)]
    command += ["--trainer.max_epochs", "1"] * tiny
    return folder, " ".join(command) if subprocess.call(command) else ""


def read_run(folder: Path) -> dict[str, Any]:
    """Return the summary of a run, and its curves as lists of (iteration, value)."""
    run = json.loads((folder / "summary.json").read_text())
    newest = max(folder.glob("csv/version_*/metrics.csv"), key=lambda path: path.stat().st_mtime)
    curves: dict[str, list[tuple[int, float]]] = {metric: [] for metric in CURVES}
    if run["held_out_accuracy_before"] is not None:
        curves["val/accuracy"].append((0, run["held_out_accuracy_before"]))
    with newest.open() as file:
        for row in csv.DictReader(file):
            for metric, curve in curves.items():
                if row.get(metric):
                    curve.append((int(row["step"]) + 1, float(row[metric])))
    return run | {"curves": {metric: curve for metric, curve in curves.items() if curve}}


def rows_of(runs: Sequence[Mapping[str, Any]], goal: float | None = None) -> tuple[list[str], list[list[Any]]]:
    """Return header and rows of the table: one run a row, with its seconds to a reward if there is one to reach."""
    header = ["arm", "seed", "iterations", "accuracy before", "after", "reward, first fifth", "last fifth"]
    has_turns = any("environment/turns" in run["curves"] for run in runs)
    header += ["turns, first fifth", "last fifth"] * has_turns
    rows = []
    for run in runs:
        rows.append(
            [run["arm"], run["seed"], run["iterations"]]
            + [run["held_out_accuracy_before"], run["held_out_accuracy_after"], *fifths(run, "reward/mean")]
            + (fifths(run, "environment/turns") if has_turns else [])
            + [
                middle([value for _, value in run["curves"].get(time, [])])
                for time in ("time/iteration", "time/rollout", "time/drafter")
            ]
            + [run["seconds"]]
            + ([seconds_to(run, goal)] if goal is not None else [])
        )
    header += ["median s per iteration", "of it rollout", "drafter", "seconds in all"]
    return [*header, *([f"iterations' s to reward {goal}"] if goal is not None else [])], rows


def seconds_to(run: Mapping[str, Any], goal: float) -> float | None:
    """Return the seconds of iterations until the mean reward of three is `goal`; None where it never is."""
    rewards, seconds = ([value for _, value in run["curves"][name]] for name in ("reward/mean", "time/iteration"))
    for end in range(3, len(rewards) + 1):
        if statistics.mean(rewards[end - 3 : end]) >= goal:
            return sum(seconds[:end])
    return None


def fifths(run: Mapping[str, Any], metric: str) -> list[float]:
    """Return the means of a metric over the first and over the last fifth of the iterations."""
    values = [value for _, value in run["curves"][metric]]
    fifth = max(1, len(values) // 5)
    return [statistics.mean(values[:fifth]), statistics.mean(values[-fifth:])]


def picture(runs: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw reward and held-out accuracy over iterations: a line for each arm's mean, thin ones for its seeds."""
    figure, panels = plots.frame(2)
    colours = plots.colours_of(run["arm"] for run in runs)
    for panel, metric, label in zip(panels, CURVES, ("mean reward", "held-out accuracy"), strict=False):
        panel.set_ylabel(label, fontsize=9)
        for arm, colour in colours.items():
            curves = [dict(run["curves"].get(metric, [])) for run in runs if run["arm"] == arm]
            shared = sorted(set.intersection(*map(set, curves)))
            for curve in curves:
                panel.plot(shared, [curve[x] for x in shared], color=colour, alpha=0.25, linewidth=0.8)
            means = [statistics.mean(curve[x] for curve in curves) for x in shared]
            panel.plot(shared, means, color=colour, label=arm, linewidth=1.8, marker="o" * (len(shared) < 10) or None)
    panels[0].legend(frameon=False, fontsize=9)
    plots.save(figure, path)
