"""Follow a teacher beside learning from the reward alone, from the same policy on as many responses, several seeds.

    python -m benchmarks distillation

The teacher is the recipe's policy after `--teacher-iterations` of GRPO, or `--teacher`, a folder that `export` has
written. Each run is one of the command line, in `outputs/learning/<recipe>_<arm>_<seed>`; `--tiny` runs one iteration.
"""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.common.arguments import ROOT, parser_of
from benchmarks.common.results import about, heading, save, table
from benchmarks.end_to_end.learning import fit, read_run

OVERLAY = "recipes/distillation.yaml"
HEADER = ["arm", "seed", "iterations", "tokens written", "accuracy before", "after", "divergence, first", "last"]


def main(arguments: list[str]) -> None:
    """Make a teacher, run both arms of every seed, and write the results after each run."""
    parser = parser_of(__doc__)
    parser.add_argument("--recipe", default="recipes/quickstart.yaml")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--iterations", type=int, default=5)
    parser.add_argument("--teacher-iterations", type=int, default=20)
    parser.add_argument("--teacher", help="its folder; none makes one")
    args = parser.parse_args(arguments)
    name, runs = Path(args.recipe).stem, list[dict[str, Any]]()
    teacher = args.teacher or make_teacher(name, args.recipe, args.teacher_iterations, args.seed, args.tiny)
    last = 1 if args.tiny else args.iterations
    ending = [f"--trainer.max_epochs={last}", f"--trainer.check_val_every_n_epoch={last}"]
    arms = {"GRPO": [], "Distillation": [OVERLAY, f"--model.reference={teacher}"]}
    for seed in args.seeds:
        for arm, overlays in arms.items():
            folder, error = fit(name, arm, [args.recipe, *overlays, *ending], seed, args.tiny)
            if error:
                raise SystemExit(f"arm {arm!r}, seed {seed}, failed: {error}")
            runs.append({"arm": arm, **read_run(folder), "seed": seed, **read_metrics(folder)})
            record = {**about(name, args.note, args.seed, on_cpu=True), "runs": runs}
            lines = [*heading("Distillation", record), *table(HEADER, [row_of(run) for run in runs])]
            save(args.out / f"distillation_{name}", record, lines)


def make_teacher(name: str, recipe: str, iterations: int, seed: int, tiny: bool) -> str:
    """Train the recipe's policy and export it; return the folder."""
    folder, error = fit(name, "teacher", [recipe, f"--trainer.max_epochs={iterations}"], seed, tiny)
    exported = str(folder / "policy")
    command = [sys.executable, "-m", "tlt_lightning", "export", "--ckpt_path", str(folder / "checkpoints/last.ckpt")]
    if error or subprocess.call([*command, "--output_dir", exported, "--dtype", "float32"], cwd=ROOT):
        raise SystemExit(f"there is no teacher: {error or 'it could not be exported'}")
    return exported


def read_metrics(folder: Path) -> dict[str, Any]:
    """Return the tokens that a run wrote, and its divergence from the teacher by iteration."""
    newest = max(folder.glob("csv/version_*/metrics.csv"), key=lambda path: path.stat().st_mtime)
    with newest.open() as file:
        rows = list(csv.DictReader(file))
    tokens = sum(float(row["rollout/tokens"]) for row in rows if row.get("rollout/tokens"))
    divergence = [float(row["train/divergence"]) for row in rows if row.get("train/divergence")]
    return {"tokens": int(tokens), "divergence": divergence}


def row_of(run: dict[str, Any]) -> list[Any]:
    """Return a run's row of the table."""
    ends = [run["divergence"][0], run["divergence"][-1]] if run["divergence"] else [None, None]
    accuracies = [run["held_out_accuracy_before"], run["held_out_accuracy_after"]]
    return [run["arm"], run["seed"], run["iterations"], run["tokens"], *accuracies, *ends]
