"""Compare budgets of a drafter's training in simulated runs, some of them fitted to recorded ones. No GPU.

    python -m benchmarks budget

A recorded run's head is fitted by the simulation's law of learning: skill 0, speed, best acceptance and drift that come
nearest to its held-out acceptance before and after each stretch of training. Prices and decode seconds are its own.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np

from benchmarks.common.arguments import parser_of
from benchmarks.common.results import about, heading, save, table
from benchmarks.micro.rule_budget import RuleBudget
from tests.support.simulations.training import World, simulate
from tlt_lightning.long_tail.adaptive_budget import AdaptiveBudget
from tlt_lightning.long_tail.budget import FixedBudget, TrainingBudget

RESULTS = Path(__file__).parents[1] / "results"
COLD = World()
WORLDS = {
    "cold": COLD,
    "cold, slow": replace(COLD, speed=0.05),
    "cold, dear": replace(COLD, price=lambda iteration: 60.0),
    "cold, late": replace(COLD, lag=0.2),
    "cold, saves more": replace(COLD, exponent=1.0),
    "drift": World(skill=3.0, drift=lambda iteration: 0.1, price=lambda iteration: 15.0),
    "late drift": World(
        skill=5.0, drift=lambda iteration: 0.1 if iteration >= 40 else 0.0, price=lambda iteration: 6.0
    ),
    "price rises": World(drift=lambda iteration: 0.03, price=lambda iteration: 60.0 if iteration >= 30 else 6.0),
    "idle windows": replace(COLD, idle_share=0.3, drift=lambda iteration: 0.03),
    "nothing left to learn": World(skill=20.0),
    "learns nothing": World(skill=2.0, speed=0.0),
    "cold, learns nothing": World(speed=0.0),
    "another drafter is better": World(usage=0.0),
}
NEEDED = {"rollout/tokens", "time/rollout", "time/iteration", "speculation/acceptance_length"}
SKILLS = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0)
SPEEDS = (0.0, 0.01, 0.03, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0)
BESTS = (1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0)
DRIFTS = (0.0, 0.003, 0.01, 0.03, 0.1)
BUDGETS: dict[str, type[TrainingBudget]] = {"Bayesian": AdaptiveBudget, "rule": RuleBudget}
NAMES = ("no training", *BUDGETS)
CONSTANT = (0.0, *(2.0**-number for number in range(8)))


def recorded_runs() -> dict[str, list[dict[str, float]]]:
    """Return the metrics of each iteration of all recorded runs with decisions about a head, by file and arm."""
    runs = {}
    for path in sorted(RESULTS.glob("end_to_end_*.json")):
        for run in json.loads(path.read_text()).get("runs", []):
            metrics = [each["metrics"] for each in run["iterations"]]
            decisions = sum("drafter/acceptance_after" in each for each in metrics)
            if decisions >= 3 and all(set(each) >= NEEDED for each in metrics):
                runs[f"{path.stem.removeprefix('end_to_end_')}, {run['arm']}, seed {run['seed']}"] = metrics
    return runs


def fit(metrics: Sequence[dict[str, float]]) -> tuple[World, float]:
    """Return the world nearest to a run, and the mean error of its acceptance, relative."""
    shares = np.array([each.get("drafter/tokens", 0.0) / each["rollout/tokens"] for each in metrics])
    grid = np.array([(s, v, b, d) for s, v, b, d in product(SKILLS, SPEEDS, BESTS, DRIFTS)])
    start, speed, best, drift = grid.T
    trained, served, error, count = start.copy(), start.copy(), np.zeros(len(grid)), 0
    for number, each in enumerate(metrics):
        if "drafter/acceptance_after" in each:
            for skill, name in ((served, "before"), (trained, "after")):
                guess = 1 + (best - 1) * skill / (skill + 1)
                error += abs(np.log(guess / each[f"drafter/acceptance_{name}"]))
                count += 1
            served = trained.copy() if each["drafter/published"] else served
        trained = (trained + speed * shares[number]) * (1 - drift)
        served = served * (1 - drift)
    nearest = int(error.argmin())
    start, speed, best, drift = map(float, grid[nearest])
    decode = [each["time/rollout"] + each.get("time/idle", 0.0) for each in metrics]
    plain = [s * each["speculation/acceptance_length"] ** 0.5 for s, each in zip(decode, metrics, strict=True)]
    rest = [each["time/iteration"] - s - each.get("time/drafter", 0.0) for s, each in zip(decode, metrics, strict=True)]
    price = sum(each.get("drafter/seconds_not_hidden", 0.0) for each in metrics) / max(float(shares.sum()), 1e-9)
    usage = mean(each.get("speculation/learned_share", 0.0) for each in metrics[1:])
    world = World(best, start, speed, 0.0, lambda _: drift, median(plain), 0.5, lambda _: price, usage)
    return replace(world, other=median(rest)), float(error[nearest]) / count


def measure(world: World, num_iterations: int, seeds: int) -> dict[str, float]:
    """Return each budget's seconds of a run, relative to the best constant share's; below 0 is less."""
    constant = {
        share: simulate(world, FixedBudget(share, 1 if share else 10**6), num_iterations).seconds for share in CONSTANT
    }
    best = min(constant.values())
    row = {"no training": constant[0.0] / best - 1}
    for name, budget in BUDGETS.items():
        outcomes = [simulate(world, budget(), num_iterations, seed).seconds for seed in range(seeds)]
        row[name] = mean(outcomes) / best - 1
    return row


def main(arguments: Sequence[str]) -> None:
    """Simulate all worlds and write `budget.json` and `.md`."""
    args = parser_of(__doc__).parse_args(arguments)
    results: dict[str, Any] = about("13 simulated worlds, and recorded runs", args.note, args.seed, on_cpu=True)
    seeds = 1 if args.tiny else 4
    results["worlds"] = [{"name": name, **measure(world, 100, seeds)} for name, world in WORLDS.items()]
    results["recorded"] = []
    for name, metrics in recorded_runs().items():
        world, error = fit(metrics)
        fitted = {"skill": world.skill, "speed": world.speed, "best": world.best, "drift": world.drift(0)}
        own = {f"{key}, as recorded": value for key, value in measure(world, len(metrics), seeds).items()}
        longer = {f"{key}, 100": value for key, value in measure(world, 100, seeds).items()}
        results["recorded"].append({"name": name, "error": error, **fitted, **own, **longer})
    lines = heading("Budgets of a drafter's training", results)
    lines += [
        "Seconds of a run against those with the best constant share of the tokens, which is known in hindsight. "
        "`RuleBudget` trains on all tokens until two decisions in a row have not paid, then on an eighth; it was tuned "
        "in the simulated runs, as `AdaptiveBudget` was, which weighs 180 hypotheses.\n",
        *table(["simulated run of 100 iterations", *NAMES], percent(results["worlds"], NAMES)),
        "Worlds fitted to recorded runs: `error` is the mean relative error of the fitted acceptance. The first three "
        "columns simulate as many iterations as were recorded.\n",
    ]
    names = [f"{name}, {length}" for length in ("as recorded", "100") for name in NAMES]
    cells = percent(results["recorded"], names)
    errors = [f"{100 * row['error']:.0f}%" for row in results["recorded"]]
    cells = [[row[0], error, *row[1:]] for row, error in zip(cells, [*errors, ""], strict=True)]
    lines += table(["recorded run", "error", *names], cells)
    save(args.out / "budget", results, lines)
    print("\n".join(lines))


def percent(rows: Sequence[dict[str, Any]], names: Sequence[str]) -> list[list[str]]:
    """Return rows of a table with their mean below."""
    cells = [[row["name"], *(f"{100 * row[name]:+.1f}%" for name in names)] for row in rows]
    return [*cells, ["mean", *(f"{100 * mean(row[name] for row in rows):+.1f}%" for name in names)]]
