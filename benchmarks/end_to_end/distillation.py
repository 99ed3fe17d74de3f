"""Follow a teacher beside learning from the reward alone, from the same policy on as many tokens, several seeds.

    python -m benchmarks distillation

The teacher is the recipe's policy after `--teacher-iterations` of GRPO, or `--teacher`, a folder that `export` has
written. First each arm tries the same learning rates and numbers of optimizer steps an iteration with a seed of its
own, `--tuning-seed`, and the settings that answer the most held-out questions are those of all seeds. Distillation
needs no groups: it has as many prompts as GRPO has responses. GRPO has an iteration more (`--more`), as a student that
takes over its teacher's patience writes more tokens in each.

Each run is one of the command line, in `outputs/learning/<recipe>_<arm>_<seed>`; `--tiny` runs one iteration.
"""

from __future__ import annotations

import csv
import itertools
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.arguments import ROOT, parser_of
from benchmarks.common.results import about, heading, save, table
from benchmarks.end_to_end.learning import fit, read_run

OVERLAY = "recipes/distillation.yaml"
HEADER = ["arm", "seed", "learning rate", "steps an iteration", "tokens learned from", "accuracy before", "after"]
Setting = tuple[float, int]
"""Learning rate, and optimizer steps of an iteration."""


def main(arguments: list[str]) -> None:
    """Make a teacher, tune both arms, run them on every seed, and write the results after each run."""
    parser = parser_of(__doc__)
    parser.add_argument("--recipe", default="recipes/quickstart.yaml")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--iterations", type=int, default=2)
    parser.add_argument("--more", type=int, default=1, help="iterations of GRPO")
    parser.add_argument("--responses", type=int, default=256, help="of an iteration, of GRPO eight to a prompt")
    parser.add_argument("--rates", nargs="+", type=float, default=[5e-4, 1e-3], help="to try")
    parser.add_argument("--steps", nargs="+", type=int, default=[1, 8], help="of an iteration, to try")
    parser.add_argument("--tuning-seed", type=int, default=3)
    parser.add_argument("--teacher-iterations", type=int, default=30)
    parser.add_argument("--teacher", help="its folder; none makes one")
    args = parser.parse_args(arguments)
    name = Path(args.recipe).stem
    teacher = args.teacher or make_teacher(name, args.recipe, args.teacher_iterations, args.seed, args.tiny)

    def epochs(count: int) -> list[str]:
        last = 1 if args.tiny else count
        return [f"--trainer.max_epochs={last}", f"--trainer.check_val_every_n_epoch={last}"]

    arms = {
        "GRPO": [
            *(args.recipe, *epochs(args.iterations + args.more)),
            *("--data.group_size=8", f"--data.prompts_per_iteration={args.responses // 8}"),
        ],
        "Distillation": [
            *(args.recipe, OVERLAY, *epochs(args.iterations), f"--model.reference={teacher}"),
            *("--data.group_size=1", f"--data.prompts_per_iteration={args.responses}"),
        ],
    }
    tried, runs, settings = (
        list[dict[str, Any]](),
        list[dict[str, Any]](),
        list(itertools.product(args.rates, args.steps)),
    )

    def run(arm: str, setting: Setting, seed: int) -> dict[str, Any]:
        rate, steps = setting
        options = [f"--model.optimizer.init_args.lr={rate}", f"--data.num_minibatches={steps}"]
        folder, error = fit(name, f"{arm}_{rate:g}_{steps}", [*arms[arm], *options], seed, args.tiny)
        if error:
            raise SystemExit(f"arm {arm!r}, seed {seed}, failed: {error}")
        return {"arm": arm, "rate": rate, "steps": steps, **read_run(folder), "seed": seed, **read_metrics(folder)}

    def write() -> None:
        record = {**about(name, args.note, args.seed, on_cpu=True), "runs": runs, "tried": tried}
        lines = [*heading("Distillation", record), *table(*rows_of(runs)), "Tried with another seed:\n"]
        save(args.out / f"distillation_{name}", record, [*lines, *table(*rows_of(tried))])

    for arm, setting in itertools.product(arms, settings):
        tried.append(run(arm, setting, args.tuning_seed))
        write()
    for seed, arm in itertools.product(args.seeds, arms):
        runs.append(run(arm, best_setting(tried, arm), seed))
        write()


def best_setting(tried: Sequence[dict[str, Any]], arm: str) -> Setting:
    """Return the setting with which an arm has answered the most held-out questions."""
    best = max((run for run in tried if run["arm"] == arm), key=lambda run: run["held_out_accuracy_after"])
    return best["rate"], best["steps"]


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


def rows_of(runs: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[Any]]]:
    """Return header and rows of the table: one run a row."""
    rows = []
    for run in runs:
        ends = [run["divergence"][0], run["divergence"][-1]] if run["divergence"] else [None, None]
        accuracies = [run["held_out_accuracy_before"], run["held_out_accuracy_after"]]
        rows.append([run["arm"], run["seed"], f"{run['rate']:g}", run["steps"], run["tokens"], *accuracies, *ends])
    return [*HEADER, "divergence, first", "last"], rows
