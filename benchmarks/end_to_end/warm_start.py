"""Learn a task that the policy cannot do at first: by GRPO alone, and by GRPO after supervised fine-tuning.

    python -m benchmarks warm_start

The quickstart's policy answers a question of Countdown by an expression, `<answer> 3 * 7`. Here an answer counts if it
is an equation, `<answer> 21 = 3 * 7`, which it has never written: all of its rewards are 0. A few searches that end in
equations are imitated first. Runs are those of the command line, in `outputs/warm_start/<arm>_<seed>`; `--tiny` runs
one iteration of each.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.common.arguments import ASSETS, ROOT, parser_of
from benchmarks.common.results import about, heading, save, table
from benchmarks.end_to_end.learning import picture, read_run
from tlt_lightning.rewards.countdown import ANSWER, countdown

ARMS = ("GRPO", "SFT, then GRPO")


def equation(prompt: str, response: str, row: dict[str, Any]) -> float:
    """Return 1 if the answer is an equation of the target and an expression that is right, else 0."""
    _, mark, answer = response.rpartition(ANSWER)
    target, equals, expression = answer.partition("=")
    is_equation = bool(mark and equals) and target.strip() == str(row["answer"])
    return countdown(prompt, f"{ANSWER}{expression}", row) if is_equation else 0.0


def write_texts(path: Path, count: int) -> None:
    """Write searches whose answers are equations: the assets' shortest ones."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [json.loads(line) for line in (ASSETS / "searches.jsonl").read_text().splitlines()]
    with path.open("w") as file:
        for row in sorted(rows, key=lambda row: len(row["completion"]))[:count]:
            target = row["prompt"].split()[1]
            row["completion"] = row["completion"].replace(ANSWER, f"{ANSWER} {target} =")
            file.write(json.dumps(row) + "\n")


def main(arguments: list[str]) -> None:
    """Run both arms on every seed, and write the results after each run."""
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--iterations", type=int, default=6, help="of GRPO")
    parser.add_argument("--texts", type=int, default=160, help="searches that are imitated")
    parser.add_argument("--passes", type=int, default=10, help="over them")
    args = parser.parse_args(arguments)
    folder, runs = ROOT / "outputs/warm_start", list[dict[str, Any]]()
    write_texts(folder / "texts.jsonl", args.texts)
    for seed in args.seeds:
        for arm in ARMS:
            policy, seconds = str(ASSETS / "policy"), 0.0
            if arm != ARMS[0]:
                policy, seconds = imitate(folder, seed, 1 if args.tiny else args.passes)
            out = folder / f"{arm.replace(', ', '_').replace(' ', '_')}_{seed}"
            options = {
                "data.rewards": '[{"function": "benchmarks.end_to_end.warm_start.equation"}]',
                "data.prompts_per_iteration": 2 if args.tiny else 16,
                "data.sampling.max_tokens": 32 if args.tiny else 160,
                "trainer.max_epochs": 1 if args.tiny else args.iterations,
                "trainer.limit_val_batches": 4 if args.tiny else 64,
                "trainer.check_val_every_n_epoch": 1 if args.tiny else 3,
                "model.policy": policy,
            }
            run("quickstart", out, seed, options)
            runs.append({"arm": arm, **read_run(out), "seed": seed, "sft_seconds": seconds})
            record = about("quickstart", args.note, args.seed, on_cpu=True) | {"runs": runs}
            save(args.out / "warm_start", record, [*heading("Warm start", record), *table(*rows_of(runs))])
            picture(runs, args.out / "warm_start.png")


def imitate(folder: Path, seed: int, passes: int) -> tuple[str, float]:
    """Fine-tune the quickstart's policy; return the folder it is exported to, and the seconds of the run."""
    out = folder / f"SFT_{seed}"
    options = {
        "data.init_args.train": json.dumps({"path": str(folder / "texts.jsonl"), "split": "train"}),
        "data.init_args.val": "null",
        "data.init_args.batch_size": 8,
        "model.optimizer.init_args.lr": 1e-3,
        "trainer.max_epochs": passes,
        "trainer.num_sanity_val_steps": 0,
    }
    run("sft_quickstart", out, seed, options)
    command = [sys.executable, "-m", "tlt_lightning", "export", "--ckpt_path", str(out / "checkpoints/last.ckpt")]
    subprocess.check_call([*command, "--output_dir", str(out / "policy")])
    return str(out / "policy"), json.loads((out / "summary.json").read_text())["seconds"]


def run(recipe: str, out: Path, seed: int, options: dict[str, Any]) -> None:
    """Do a run of the command line."""
    command = [sys.executable, "-m", "tlt_lightning", "fit", "-c", str(ROOT / f"recipes/{recipe}.yaml")]
    command += [f"--{name}={value}" for name, value in options.items()]
    subprocess.check_call([*command, f"--seed_everything={seed}", f"--trainer.default_root_dir={out}"], cwd=ROOT)


def rows_of(runs: list[dict[str, Any]]) -> tuple[list[str], list[list[Any]]]:
    """Return header and rows of the table: one run a row."""
    header = ["arm", "seed", "held-out accuracy before RL", "after", "reward, first iteration", "last"]
    rows = []
    for each in runs:
        rewards = [value for _, value in each["curves"]["reward/mean"]]
        accuracy = [value for _, value in each["curves"]["val/accuracy"]]
        rows.append([each["arm"], each["seed"], accuracy[0], accuracy[-1], rewards[0], rewards[-1]])
        rows[-1] += [each["sft_seconds"], each["seconds"]]
    return [*header, "seconds of SFT", "of RL"], rows
