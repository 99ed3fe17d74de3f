"""How well objectives learn the quickstart's task: held-out accuracy before and after, by objective and seed.

    python -m benchmarks learning --objectives GRPO --seeds 0 1 2                       # the quickstart on three seeds
    python -m benchmarks learning --accelerator gpu --jobs 5 --objectives GRPO DrGRPO RLOO CISPO PPO --seeds 0 1 2

Each run is `python -m tlt_lightning fit` on the quickstart's recipes in a process of its own. Writes a table and the
numbers to `benchmarks/results/<name>.{md,json}`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.common.results_file import about, heading, save

ROOT = Path(__file__).parents[2]
OVERRIDES = {
    "GRPO": [],
    "DrGRPO": ["--model.objective", "DrGRPO", "--model.objective.aggregation.max_tokens", "720"],
    "RLOO": ["--model.objective", "RLOO"],
    "CISPO": ["--model.objective", "CISPO"],
    "PPO": ["-c", str(ROOT / "recipes/ppo_quickstart.yaml")],
}
# CUDA runs compute in bfloat16 on both sides, and share one device.
ON_GPU = [
    *("--trainer.accelerator", "gpu", "--trainer.precision", "bf16-mixed"),
    *("--data.engine.init_args.dtype", "bfloat16", "--data.engine.init_args.gpu_memory_utilization", "0.1"),
    *("--data.engine.init_args.sleep", "false"),
]


def run(objective: str, seed: int, args: argparse.Namespace) -> dict[str, float | int | str]:
    """Run one training and return its summary; raises RuntimeError with the end of its output if it fails."""
    folder = args.folder / f"{objective}_{seed}"
    command = [sys.executable, "-m", "tlt_lightning", "fit", "-c", "recipes/base.yaml", "-c", "recipes/quickstart.yaml"]
    command += [*OVERRIDES[objective], "--seed_everything", str(seed), "--trainer.default_root_dir", str(folder)]
    command += ["--trainer.enable_progress_bar", "false", *(ON_GPU if args.accelerator == "gpu" else [])]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    started = time.perf_counter()
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout[-1500:]}\n{done.stderr[-3000:]}")
    summary = json.loads((folder / "summary.json").read_text())
    print(f"{objective} seed {seed}: {summary}", flush=True)
    return {"objective": objective, **summary, "process_seconds": round(time.perf_counter() - started, 1)}


def table(results: list[dict]) -> str:
    """The results as Markdown, with the mean over seeds below each objective."""
    lines = [
        "| objective | seed | accuracy before | accuracy after | gain | length p50 | length max | seconds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for objective in dict.fromkeys(row["objective"] for row in results):
        rows = [row for row in results if row["objective"] == objective]
        for row in rows:
            before, after = row["held_out_accuracy_before"], row["held_out_accuracy_after"]
            lines.append(
                f"| {objective} | {row['seed']} | {before:.3f} | {after:.3f} | {after - before:+.3f} "
                f"| {row['length_p50']:.0f} | {row['length_max']:.0f} | {row['seconds']:.0f} |"
            )
        after = statistics.mean(row["held_out_accuracy_after"] for row in rows)
        gain = after - statistics.mean(row["held_out_accuracy_before"] for row in rows)
        lines.append(f"| **{objective}** | mean | | **{after:.3f}** | **{gain:+.3f}** | | | |")
    return "\n".join(lines)


def main() -> None:
    """Run everything and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--objectives", nargs="+", choices=list(OVERRIDES), default=["GRPO"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--accelerator", choices=["cpu", "gpu"], default="cpu")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time")
    parser.add_argument("--name", default="learning", help="name of the result files")
    parser.add_argument("--folder", type=Path, default=Path("outputs/learning"), help="where the runs write")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ROOT / "benchmarks/results")))
    args = parser.parse_args()
    runs = [(objective, seed) for seed in args.seeds for objective in args.objectives]
    with ThreadPoolExecutor(args.jobs) as pool:
        results = list(pool.map(lambda item: run(*item, args), runs))
    results.sort(key=lambda row: (args.objectives.index(str(row["objective"])), row["seed"]))
    note = f"{args.jobs} runs at a time: their seconds are not those of a run alone." if args.jobs > 1 else ""
    record = about(args.name, note, args.seeds[0], on_cpu=args.accelerator == "cpu")
    save(args.out / f"{args.name}.json", {**record, "runs": results})
    text = "\n".join([*heading("Learning", record), table(results), ""])
    (args.out / f"{args.name}.md").write_text(text)
    print(f"\n{text}")


if __name__ == "__main__":
    main()
