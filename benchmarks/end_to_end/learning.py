"""Train a recipe on several seeds and table its held-out accuracy before and after.

`python -m benchmarks learning --recipe recipes/quickstart_smollm2.yaml`. Each seed is a run of the command line, in
`outputs/learning/<recipe>_<seed>`; `--tiny` runs one iteration of each.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from benchmarks.common.arguments import ROOT, parser_of
from benchmarks.common.results import about, heading, save, table


def main(arguments: list[str]) -> None:
    """Run every seed in turn, and write the results after each."""
    parser = parser_of(__doc__)
    parser.add_argument("--recipe", nargs="+", required=True, help="recipe files, in the order of `-c`")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    args = parser.parse_args(arguments)
    name, runs = Path(args.recipe[-1]).stem, []
    for seed in args.seeds:
        folder = ROOT / f"outputs/learning/{name}_{seed}"
        files = [part for file in args.recipe for part in ("-c", file)]
        command = [sys.executable, "-m", "tlt_lightning", "fit", *files, "--seed_everything", str(seed)]
        command += ["--trainer.default_root_dir", str(folder), *["--trainer.max_epochs", "1"] * args.tiny]
        subprocess.run(command, cwd=ROOT, check=True)
        run = json.loads((folder / "summary.json").read_text())
        before, after = run["held_out_accuracy_before"], run["held_out_accuracy_after"]
        run["gain"] = None if None in (before, after) else after - before
        runs.append({column.removeprefix("held_out_"): value for column, value in run.items()})
        record = about(name, args.note, args.seed)
        report = heading("Learning", record) + table(list(runs[0]), [list(run.values()) for run in runs])
        save(args.out / f"learning_{name}", {**record, "runs": runs}, report)
