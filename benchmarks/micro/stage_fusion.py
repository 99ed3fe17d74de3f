"""Measure what it would save to score finished answers while other workers still write (RLHFuse, arXiv 2409.13221).

    python -m benchmarks stage_fusion

Two workers run a recipe under the synchronous schedule with a reference policy, each with an engine of its own, by
`ddp`. Of each iteration but the first the stages of each worker are taken from the run's report:

    own windows     a worker scores its own answers while it waits; the last to write has no window, and all meet in the
                    update: saved is the longest scoring less what is left of it outside the windows
    all hidden      an upper bound: others score for the last one, too, and nothing of the stage is left

Without a reference or a critic an iteration of one optimizer step scores nothing, and there is nothing to hide.
"""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.arguments import ROOT, parser_of
from benchmarks.common.results import about, heading, save, table
from benchmarks.common.statistics import spread

Stages = Mapping[str, float]
"""Seconds of a worker's iteration by stage."""


def main(arguments: list[str]) -> None:
    """Run the recipe, and write what the windows would have hidden."""
    parser = parser_of(__doc__)
    parser.add_argument("--recipe", nargs="+", default=["recipes/quickstart.yaml"], help="files, in the order of `-c`")
    parser.add_argument("--iterations", type=int, default=12)
    args = parser.parse_args(arguments)
    count, folder = 2 if args.tiny else args.iterations, ROOT / "outputs/stage_fusion"
    command = [sys.executable, "-m", "tlt_lightning", "fit"]
    command += [part for path in args.recipe for part in ("-c", path)]
    command += ["--trainer.devices=2", "--trainer.strategy=ddp", f"--trainer.max_epochs={count}"]
    command += ["--model.objective.class_path=GRPO", "--model.objective.init_args.loss_kl.coef=0.001"]
    command += ["--trainer.limit_val_batches=0", "--trainer.num_sanity_val_steps=0"]
    command += [f"--seed_everything={args.seed}", f"--trainer.default_root_dir={folder}"]
    subprocess.run(command, check=True, cwd=ROOT)
    iterations = read_stages(folder / "report.html")[1:]
    record = {**about("quickstart", args.note, args.seed, on_cpu=True), "iterations": iterations}
    save(args.out / "stage_fusion", record, [*heading("Stage fusion", record), *table(*rows_of(iterations))])


def read_stages(path: Path) -> list[list[dict[str, float]]]:
    """Return the seconds by stage of each worker in each iteration that a report shows in detail."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script', path.read_text(), re.DOTALL)
    assert found is not None
    details = json.loads(found[1])["details"]
    iterations = []
    for number in sorted(details, key=int):
        ranks: list[dict[str, float]] = []
        for laps in details[number]["ranks"]:
            ranks.append({})
            for stage, seconds in laps:
                ranks[-1][stage] = ranks[-1].get(stage, 0.0) + seconds
        iterations.append(ranks)
    return iterations


def saved_in_windows(ranks: Sequence[Stages]) -> float:
    """Return the seconds that an iteration would save if each worker scored its own answers while it waits."""
    scoring = [rank.get("logprobs", 0.0) for rank in ranks]
    left = [max(0.0, seconds - rank.get("idle", 0.0)) for rank, seconds in zip(ranks, scoring, strict=True)]
    return max(scoring) - max(left)


def rows_of(iterations: Sequence[Sequence[Stages]]) -> tuple[list[str], list[list[Any]]]:
    """Return header and rows: medians and quartiles in seconds, and shares of the iterations' time."""
    whole = [max(sum(rank.values()) for rank in ranks) for ranks in iterations]
    measured = {
        "iteration": whole,
        "idle, of the worker that waits longest": [max(rank.get("idle", 0.0) for rank in each) for each in iterations],
        "scoring, of the worker that scores longest": [
            max(r.get("logprobs", 0.0) for r in each) for each in iterations
        ],
        "saved, own windows": [saved_in_windows(ranks) for ranks in iterations],
    }
    measured["saved at most, all hidden"] = measured["scoring, of the worker that scores longest"]
    header = ["", "seconds", "share of the time"]
    return header, [
        [name, spread(values, 3), f"{statistics.fmean(values) / statistics.fmean(whole):.1%}"]
        for name, values in measured.items()
    ]
