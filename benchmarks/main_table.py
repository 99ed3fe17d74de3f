"""Measure the main table of docs/results.md on one GPU, with one command, in 30 minutes.

    python -m benchmarks main_table
    python -m benchmarks main_table --tiny      # on a CPU, to see that it works; no head, no TRL

Each step below is a benchmark of its own, run one after the other in a process of its own with a limit of seconds. A
step that fails or is cut off leaves out what it had not measured, and the table says so. What is finished is kept:
`--steps` runs some of them, beside what earlier commands have left in `--out`. Every ratio is of two arms of one
command on one GPU.

- `target`, `pad`: train the 23M policy and its head, pad both to the cost of 7B.
- `rollout`, `sampled`, `fp8`: plain vLLM, vLLM's own EAGLE-3 with 3 and 5 drafts in every step, ours with greedy
  drafts, with sampled ones, and these in fp8; as many engines at once as 80 GB hold.
- `iteration`: a GRPO iteration of plain vLLM, of ours, and of TRL with colocated vLLM, on recorded lengths.
- `cold`: eight iterations of a run that starts without a head, beside plain vLLM.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.common.arguments import parser_of
from benchmarks.common.results import about, heading, save, table
from benchmarks.end_to_end.report import timed

OURS = ("adaptive", "adaptive, sampled drafts", "adaptive, sampled drafts, fp8")
STOCK = ("vLLM K=3", "vLLM K=5")
FEWEST = 5  # iterations that say something of a run
MODELS = {"tiny": "quickstart's policy", "25m": "23M policy", "7b": "23M policy padded to the cost of 7B"}


class Step(NamedTuple):
    """Names a benchmark's command, the seconds that it may take, and the file that it leaves."""

    command: Sequence[str]
    seconds: float
    result: str


class Row(NamedTuple):
    """Holds a line of the table; `low` and `high` are the smallest and the largest ratio of paired repetitions."""

    claim: str
    value: float
    low: float
    high: float
    baseline: str
    model: str
    repetitions: int


def steps_of(out: Path, *, tiny: bool) -> dict[str, Step]:
    """Return the steps in their order; on a CPU those that need no head."""
    if tiny:
        rollout = ["rollout", "--tiny", "--parts", "core", "lookups", "--arms", "plain", "siblings", "--repeats", "1"]
        iteration = ["end_to_end", "--tiny", "--arms", "plain", "siblings", "--iterations", "2", "--warmup", "1"]
        return {
            "rollout": Step(rollout, 300, "rollout_tiny"),
            "iteration": Step([*iteration, "--natural-arms", "plain", "--seeds", "0"], 300, "end_to_end_tiny"),
        }
    rollout = ["rollout", "--size", "7b", "--kv-gib", "7", "--repeats", "2", "--parts", "core", "others", "stock"]
    after = [*rollout, "fp8", "--resume", f"{out}/rollout_7b.json"]
    target = ["target", "--parts", "policy", "head"]
    runs = ["end_to_end", "--size", "25m", "--draft-sampling", "probabilistic", "--seeds", "0", "--warmup", "1"]
    replay = [*runs, "--modes", "replay", "--lengths", "benchmarks/results/end_to_end_25m.json", "--iterations", "3"]
    cold = [*runs, "--modes", "natural", "--natural-arms", "plain", "random-siblings", "--natural-iterations", "8"]
    return {
        "target": Step([*target, "--seconds", "60", "--head-seconds", "60"], 270, "target"),
        "pad": Step(["pad_to_7b"], 85, "widen"),
        "rollout": Step([*rollout, "--seconds", "240", "--arms", "plain", STOCK[0], OURS[0]], 260, "rollout_7b"),
        "sampled": Step([*after, "--seconds", "150", "--arms", STOCK[1], OURS[1]], 170, "rollout_7b"),
        "fp8": Step([*after, "--seconds", "130", "--arms", OURS[2]], 150, "rollout_7b"),
        "iteration": Step(
            [*replay, "--arms", "plain", "frozen", "trl", "--seconds", "430", "--name", "main_iteration"],
            445,
            "end_to_end_main_iteration",
        ),
        "cold": Step([*cold, "--seconds", "390", "--name", "main_cold"], 410, "end_to_end_main_cold"),
    }


def run(step: Step, out: Path, seed: int) -> str:
    """Run a step; return what went wrong, or nothing."""
    command = [sys.executable, "-m", "benchmarks", *step.command, "--out", str(out), "--seed", str(seed)]
    try:
        done = subprocess.run(command, timeout=step.seconds, check=False)
    except subprocess.TimeoutExpired:
        return f"cut off after {step.seconds:.0f} s"
    return "" if done.returncode == 0 else f"ended with status {done.returncode}"


def ratio(claim: str, faster: Sequence[float], slower: Sequence[float], baseline: str, model: str) -> list[Row]:
    """Return the row of how many times as fast one arm is, by its medians; none where an arm is missing."""
    if not faster or not slower:
        return []
    paired = [b / a for a, b in zip(faster, slower, strict=False)]
    value = statistics.median(slower) / statistics.median(faster)
    return [Row(claim, value, min(paired), max(paired), baseline, model, len(paired))]


def rollout_rows(results: dict[str, Any]) -> list[Row]:
    """Return the rows of a rollout: ours against plain vLLM and against vLLM's own EAGLE-3."""
    seconds: dict[str, list[float]] = {}
    for each in results["runs"]:
        if each["mode"] == "replayed":
            seconds.setdefault(each["arm"], []).append(each["seconds"])
    model = MODELS[results["about"][0]["size"]]
    plain = seconds.get("plain", [])
    stock = min((seconds[name] for name in STOCK if name in seconds), key=statistics.median, default=[])
    rows = ratio("rollout, vLLM's own EAGLE-3 at its best K", stock, plain, "plain vLLM", model)
    for name in [name for name in seconds if name not in ("plain", *STOCK)]:
        rows += ratio(f"rollout, {name}", seconds[name], plain, "plain vLLM", model)
    for name in OURS[:2]:
        rows += ratio(f"rollout, {name}", seconds.get(name, []), stock, "vLLM's own EAGLE-3", model)
    return rows


def iteration_rows(results: dict[str, Any]) -> list[Row]:
    """Return the rows of an iteration on replayed lengths, after the warm-up."""
    seconds = {
        each["arm"]: [row["metrics"]["time/iteration"] for row in timed(each, results["warmup"])]
        for each in results["runs"]
        if each["mode"] == "replay"
    }
    rows, model = [], MODELS.get(results["size"], MODELS["25m"])  # a step has a name of its own
    for baseline, name in (("plain", "the same without a head"), ("trl", "TRL 1.16 with colocated vLLM")):
        for arm in [arm for arm in seconds if arm not in (baseline, "plain", "trl")]:
            rows += ratio(f"iteration, {arm}", seconds[arm], seconds.get(baseline, []), name, model)
    return rows


def cold_rows(results: dict[str, Any]) -> list[Row]:
    """Return the row of a whole run that starts without a head, training of the head included.

    There is none where an arm was cut off within its first iterations, which compile.
    """
    seconds = {
        each["arm"]: [row["metrics"]["time/iteration"] for row in each["iterations"]]
        for each in results["runs"]
        if each["mode"] == "natural" and each["iterations"]
    }
    count = min(map(len, seconds.values()), default=0)
    whole = {arm: [sum(times[:count])] for arm, times in seconds.items() if count >= FEWEST}
    claim = f"{count} iterations from no head, its training included"
    return ratio(claim, whole.get("random-siblings", []), whole.get("plain", []), "plain vLLM", MODELS["25m"])


ROWS: dict[str, Callable[[dict[str, Any]], list[Row]]] = {
    "rollout": rollout_rows,
    "iteration": iteration_rows,
    "cold": cold_rows,
}


def render(results: dict[str, Any]) -> list[str]:
    """Return the table, and which steps are missing from it."""
    lines = heading("Main table", results["about"])
    lines += ["How many times as fast, by the medians of repetitions; in brackets the extremes of paired ones.", ""]
    header = ["claim", "times as fast", "baseline, on the same machine", "model", "repetitions"]
    cells = []
    for row in map(Row._make, results["rows"]):
        span = f" ({row.low:.2f} to {row.high:.2f})" if row.repetitions > 1 else ""
        cells.append([row.claim, f"**{row.value:.2f}**{span}", row.baseline, row.model, row.repetitions])
    lines += table(header, cells)
    seconds = ", ".join(f"{name} {took:.0f}" for name, took in results["seconds"].items())
    lines += [f"Seconds by step: {seconds}.", ""]
    faults = results["faults"].items()
    return lines + [f"- `{name}` {fault}: what it had not measured is missing." for name, fault in faults]


def main(arguments: Sequence[str]) -> None:
    """Run the steps that are asked for, and write the table of all that is there."""
    parser = parser_of(__doc__)
    parser.add_argument("--steps", nargs="*", help="run only these, and take the results of the others from `--out`")
    args: argparse.Namespace = parser.parse_args(arguments)
    steps = steps_of(args.out, tiny=args.tiny)
    chosen = list(steps) if args.steps is None else args.steps
    if unknown := set(chosen) - set(steps):
        parser.error(f"`--steps` {sorted(unknown)} is none of {', '.join(steps)}")
    results: dict[str, Any] = {"about": about("tiny" if args.tiny else "main", args.note, args.seed)}
    known = args.out / "main_table.json"
    earlier = json.loads(known.read_text()) if args.steps is not None and known.exists() else {}
    results |= {name: dict(earlier.get(name, {})) for name in ("seconds", "faults")} | {"rows": []}
    for name in chosen:
        began = time.perf_counter()
        results["faults"].pop(name, None)
        if fault := run(steps[name], args.out, args.seed):
            results["faults"][name] = fault
        results["seconds"][name] = time.perf_counter() - began
    for name, rows_of in ROWS.items():
        path = args.out / f"{steps[name].result}.json" if name in steps else None
        if path is not None and path.exists():
            results["rows"] += rows_of(json.loads(path.read_text()))
    save(args.out / "main_table", results, render(results))
    print("\n".join(render(results)))
