"""Learn a task that the policy cannot do at first: by GRPO alone, and by GRPO after supervised fine-tuning.

    python -m benchmarks warm_start
    python -m benchmarks warm_start --task products --at-once 6

`equations`, on two CPU cores: the quickstart's policy answers a question of Countdown by an expression, `<answer> 3 *
7`. Here an answer counts if it is an equation, `<answer> 21 = 3 * 7`, which it has never written: all of its rewards
are 0. A few searches that end in equations are imitated first. `products`, on one GPU: SmolLM2-135M-Instruct multiplies
numbers of two digits, and imitates worked products first. GRPO alone may have more iterations there (`--alone`).

Runs are those of the command line, in `outputs/warm_start/<task>_<arm>_<seed>`; `--tiny` runs one iteration of each, on
a CPU.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.arguments import ASSETS, ROOT, parser_of
from benchmarks.common.results import about, heading, save, table
from benchmarks.end_to_end.learning import picture, read_run
from tlt_lightning.rewards.answers import ANSWER
from tlt_lightning.rewards.countdown import countdown
from tlt_lightning.tasks import ReasoningGym

ARMS = ("GRPO", "SFT, then GRPO")
HELD_OUT = 200
"""Products that nobody learns from."""


def equation(prompt: str, response: str, row: dict[str, Any]) -> float:
    """Return 1 if the answer is an equation of the target and an expression that is right, else 0."""
    _, mark, answer = response.rpartition(ANSWER)
    target, equals, expression = answer.partition("=")
    is_equation = bool(mark and equals) and target.strip() == str(row["answer"])
    return countdown(prompt, f"{ANSWER}{expression}", row) if is_equation else 0.0


def product(prompt: str, response: str, row: dict[str, Any]) -> float:
    """Return 1 if the last number of a response is the answer, else 0."""
    numbers = re.findall(r"\d+", response.replace(",", ""))
    return float(numbers[-1:] == [str(row["answer"])])


def write_equations(path: Path, count: int) -> None:
    """Write searches whose answers are equations: the assets' shortest ones."""
    rows = [json.loads(line) for line in (ASSETS / "searches.jsonl").read_text().splitlines()]
    with path.open("w") as file:
        for row in sorted(rows, key=lambda row: len(row["completion"]))[:count]:
            target = row["prompt"].split()[1]
            row["completion"] = row["completion"].replace(ANSWER, f"{ANSWER} {target} =")
            file.write(json.dumps(row) + "\n")


def write_products(path: Path, count: int) -> None:
    """Write worked products, by tens and ones, of the questions that GRPO learns from."""
    with path.open("w") as file:
        for row in list(ReasoningGym(**products(count)["init_args"]))[HELD_OUT:]:
            file.write(json.dumps({"prompt": row["prompt"], "answer": worked(row["prompt"])}) + "\n")


def worked(question: str) -> str:
    """Return the way to the product of the two numbers in a question, and the product."""
    a, b = map(int, re.findall(r"\d+", question))
    tens, ones = b // 10 * 10, b % 10
    return f"{a} * {b} = {a} * {tens} + {a} * {ones} = {a * tens} + {a * ones} = {a * b}"


def products(count: int) -> dict[str, Any]:
    """Return questions for products, those held out and as many more as `count`."""
    config = {"min_digits": 2, "max_digits": 2}
    init_args = {"task": "products", "size": HELD_OUT + count, "config": config}
    return {"class_path": "tlt_lightning.tasks.ReasoningGym", "init_args": init_args}


@dataclass(frozen=True)
class Task:
    """Says what is imitated and what is learned by GRPO.

    Args:
        policy: Its folder.
        write_texts: Writes as many texts as it is told.
        sft: Recipe of the supervised fine-tuning, and options.
        grpo: Recipes of GRPO, of which the first alone runs on a CPU, and options.
        gpu: Options of both on a GPU that other runs share.
    """

    policy: Path
    write_texts: Callable[[Path, int], None]
    sft: tuple[str, dict[str, Any]]
    grpo: tuple[list[str], dict[str, Any]]
    gpu: tuple[dict[str, Any], dict[str, Any]] = ({}, {})


def tasks(texts: int) -> dict[str, Task]:
    """Return the tasks, of which as many texts are imitated."""
    rows = products(texts)
    return {
        "equations": Task(
            ASSETS / "policy",
            write_equations,
            ("sft_quickstart", {"model.optimizer.init_args.lr": 1e-3, "data.init_args.batch_size": 8}),
            (
                ["quickstart"],
                {
                    "data.rewards": '[{"function": "benchmarks.end_to_end.warm_start.equation"}]',
                    "data.sampling.max_tokens": 160,
                    "trainer.limit_val_batches": 64,
                },
            ),
        ),
        "products": Task(
            ROOT / "models/SmolLM2-135M-Instruct",
            write_products,
            (
                "sft_smollm2",
                {
                    "trainer.accelerator": "auto",
                    "model.optimizer": json.dumps(
                        {"class_path": "torch.optim.AdamW", "init_args": {"lr": 1e-4, "weight_decay": 0.0}}
                    ),
                    "data.init_args.batch_size": 32,
                },
            ),
            (
                ["quickstart_smollm2", "smollm2_products_1gpu"],
                {
                    "data.rewards": '[{"function": "benchmarks.end_to_end.warm_start.product"}]',
                    "data.train": json.dumps({"rows": rows, "split": f"train[{HELD_OUT}:]"}),
                    "data.val": json.dumps({"rows": rows, "split": f"train[:{HELD_OUT}]"}),
                    "data.sampling.max_tokens": 64,
                },
            ),
            (
                {"trainer.precision": "bf16-mixed", "data.init_args.micro_batch_tokens": 4096},
                {
                    "data.micro_batch_tokens": 4096,
                    "data.engine.init_args.kv_cache_gib": 1.0,
                    "data.engine.init_args.gpu_memory_utilization": 0.08,
                    "data.engine.init_args.enforce_eager": "true",  # starts sooner, and steps are few
                },
            ),
        ),
    }


def main(arguments: list[str]) -> None:
    """Run both arms on every seed, and write the results after each run."""
    parser = parser_of(__doc__)
    parser.add_argument("--task", choices=("equations", "products"), default="equations")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--iterations", type=int, default=6, help="of GRPO")
    parser.add_argument("--alone", type=int, help="iterations of GRPO alone; none is as many")
    parser.add_argument("--texts", type=int, default=160, help="that are imitated")
    parser.add_argument("--passes", type=int, default=10, help="over them")
    parser.add_argument("--at-once", type=int, default=1, help="runs side by side, on one device")
    args = parser.parse_args(arguments)
    folder, task = ROOT / "outputs/warm_start", tasks(args.texts)[args.task]
    folder.mkdir(parents=True, exist_ok=True)
    task.write_texts(folder / f"{args.task}.jsonl", args.texts)
    stem, runs, failed = (
        args.out / ("warm_start" + f"_{args.task}" * (args.task != "equations")),
        list[dict[str, Any]](),
        list[str](),
    )
    with ThreadPoolExecutor(args.at_once) as pool:
        # Those with SFT take longer, and come first.
        running = {
            (arm, seed): pool.submit(learn, task, args, folder, arm, seed) for arm in ARMS[::-1] for seed in args.seeds
        }
        for (arm, seed), each in running.items():
            try:
                runs.append({"arm": arm, "seed": seed, **each.result()})
            except subprocess.CalledProcessError as error:
                failed.append(f"arm {arm!r}, seed {seed}, failed: {error}")
                continue
            runs.sort(key=lambda run: (ARMS.index(run["arm"]), run["seed"]))
            record = about(args.task, args.note, args.seed, on_cpu=args.task == "equations") | {"runs": runs}
            save(stem, record, [*heading("Warm start", record), *table(*rows_of(runs)), *failed])
            picture(runs, stem.with_suffix(".png"))
    if failed:
        raise SystemExit("\n".join(failed))


def learn(task: Task, args: Any, folder: Path, arm: str, seed: int) -> dict[str, Any]:
    """Do a run of an arm; return what `read_run` does, and the seconds of the SFT before it."""
    policy, seconds, iterations = str(task.policy), 0.0, args.iterations
    if arm == ARMS[0]:
        iterations = args.alone or iterations
    else:
        policy, seconds = imitate(task, args, folder, seed)
    iterations = 1 if args.tiny else iterations
    out = folder / f"{args.task}_{arm.replace(', ', '_').replace(' ', '_')}_{seed}"
    recipes, options = task.grpo
    options = {
        **options,
        **({} if args.tiny else task.gpu[1]),
        "data.prompts_per_iteration": 16,
        "model.policy": policy,
        "trainer.max_epochs": iterations,
    }
    options["trainer.check_val_every_n_epoch"] = (iterations + 1) // 2
    if args.tiny:
        recipes = recipes[:1]
        options |= {"data.prompts_per_iteration": 2, "data.sampling.max_tokens": 32, "trainer.limit_val_batches": 4}
    run(recipes, out, seed, options)
    return {**read_run(out), "sft_seconds": seconds}


def imitate(task: Task, args: Any, folder: Path, seed: int) -> tuple[str, float]:
    """Fine-tune the task's policy; return the folder it is exported to, and the seconds of the run."""
    out = folder / f"{args.task}_SFT_{seed}"
    texts = {
        "rows": None,
        "path": str(folder / f"{args.task}.jsonl"),
        "split": f"train[:{16 if args.tiny else args.texts}]",
    }
    recipe, options = task.sft
    options = {
        "model.policy": str(task.policy),
        "data.init_args.train": json.dumps(texts),
        "data.init_args.val": "null",
        "trainer.max_epochs": 1 if args.tiny else args.passes,
        "trainer.num_sanity_val_steps": 0,
        **options,
        **({} if args.tiny else task.gpu[0]),
    }
    run([recipe], out, seed, options)
    command = [sys.executable, "-m", "tlt_lightning", "export", "--ckpt_path", str(out / "checkpoints/last.ckpt")]
    subprocess.check_call([*command, "--output_dir", str(out / "policy")])
    return str(out / "policy"), json.loads((out / "summary.json").read_text())["seconds"]


def run(recipes: list[str], out: Path, seed: int, options: dict[str, Any]) -> None:
    """Do a run of the command line, in place of an earlier one."""
    shutil.rmtree(out, ignore_errors=True)
    command = [sys.executable, "-m", "tlt_lightning", "fit"]
    command += [part for recipe in recipes for part in ("-c", str(ROOT / f"recipes/{recipe}.yaml"))]
    command += [f"--{name}={value}" for name, value in options.items()]
    subprocess.check_call([*command, f"--seed_everything={seed}", f"--trainer.default_root_dir={out}"], cwd=ROOT)


def rows_of(runs: list[dict[str, Any]]) -> tuple[list[str], list[list[Any]]]:
    """Return header and rows of the table: one run a row."""
    header = ["arm", "seed", "iterations", "held-out accuracy before RL", "after", "reward, first iteration", "last"]
    rows = []
    for each in runs:
        rewards = [value for _, value in each["curves"]["reward/mean"]]
        accuracy = [value for _, value in each["curves"]["val/accuracy"]]
        rows.append([each["arm"], each["seed"], each["iterations"]])
        rows[-1] += [accuracy[0], accuracy[-1], rewards[0], rewards[-1], each["sft_seconds"], each["seconds"]]
    return [*header, "seconds of SFT", "of RL"], rows
