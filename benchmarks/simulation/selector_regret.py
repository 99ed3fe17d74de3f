"""Measure each selector's loss of time against the best fixed draft length and an oracle.

    python -m benchmarks selector_regret

rolls out the scenarios below on the simulator. It needs one CPU core and less than a minute; the numbers depend on the
seeds alone. `--tiny` takes one scenario and one seed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import mean
from typing import Any

from benchmarks.common.arguments import parser_of
from benchmarks.common.results import about, heading, save, table
from benchmarks.simulation.simulator import AcceptanceProfile, RolloutSimulator, Workload, change, constant
from tlt_lightning.speculation import (
    OFF,
    BEGMABSelector,
    CostModelSelector,
    FixedSelector,
    SelectorState,
    Strategy,
    StrategySelector,
    ThresholdSelector,
)

DRAFT_LENGTHS = (1, 3, 5, 7)

HIGH = constant(0.9, 0.88, 0.86, 0.84, 0.82, 0.8, 0.78)
MIDDLE = constant(0.75, 0.72, 0.7, 0.68, 0.66, 0.64, 0.62)
LOW = constant(*[0.3] * 7)
DEAD = constant(*[0.02] * 7)


def rollout(acceptance: AcceptanceProfile, num_requests: int = 128) -> Workload:
    """Return a workload of up to 4096 tokens a response, 600 in the median, for the head."""
    return Workload(acceptance={"learned": acceptance}, num_requests=num_requests, max_length=4096)


SCENARIOS: dict[str, Workload] = {
    "high acceptance": rollout(HIGH),
    "middle acceptance": rollout(MIDDLE),
    "low acceptance": rollout(LOW),
    "useless drafter": rollout(DEAD),
    "drift from high to low": rollout(change(HIGH, LOW, 0.0, 1.0)),
    "collapse at 40%": rollout(change(HIGH, DEAD, 0.4, 0.4)),
    "recovery at 40%": rollout(change(DEAD, HIGH, 0.4, 0.4)),
    "short batch (8)": rollout(MIDDLE, num_requests=8),
    "big batch (256)": rollout(MIDDLE, num_requests=256),
}

SELECTORS: dict[str, Callable[[int], StrategySelector]] = {
    "ThresholdSelector": lambda seed: ThresholdSelector(),
    "BEGMABSelector": lambda seed: BEGMABSelector(seed=seed),
    "CostModelSelector": lambda seed: CostModelSelector(),
}

Results = dict[str, dict[str, Any]]


class Oracle(StrategySelector):
    """Knows the true acceptance and cost of every step of `simulator`, and takes the best arm."""

    def __init__(self, simulator: RolloutSimulator) -> None:
        self.simulator = simulator

    def arms(self, batch_size: int) -> tuple[Strategy, ...]:
        """Return all draft lengths, at any batch size."""
        return (OFF, *(Strategy(length) for length in DRAFT_LENGTHS))

    def select(self, state: SelectorState) -> Strategy:
        """Choose the arm with the highest true rate."""
        return max(self.arms(state.batch_size), key=lambda arm: self.simulator.expected_rate(state, arm))

    def record(self, state: SelectorState, strategy: Strategy, num_emitted: tuple[int, ...], seconds: float) -> None:
        """Learn nothing."""


def measure(scenarios: Mapping[str, Workload], seeds: Sequence[int]) -> Results:
    """Measure makespans of fixed arms, oracle and selectors (two rollouts), by scenario."""
    results: Results = {}
    for name, workload in scenarios.items():
        makespans: dict[str, list[float]] = {}
        for seed in seeds:
            simulator = RolloutSimulator(replace(workload, seed=seed))
            for length in (0, *DRAFT_LENGTHS):
                outcome = simulator.run(FixedSelector(length))
                makespans.setdefault(f"K={length}", []).append(outcome.makespan)
            makespans.setdefault("oracle", []).append(simulator.run(Oracle(simulator)).makespan)
            for selector_name, make in SELECTORS.items():
                selector = make(seed)
                for version, order in enumerate(("first", "second")):
                    makespan = simulator.run(selector, drafter_version=version).makespan
                    makespans.setdefault(f"{selector_name}, {order}", []).append(makespan)
        results[name] = {"makespan_seconds": makespans, **regrets(makespans)}
    return results


def regrets(makespans: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Return the best fixed arm, and all shares of time lost to each seed's best fixed arm."""
    fixed = {name: values for name, values in makespans.items() if name.startswith("K=")}
    least = [min(values) for values in zip(*fixed.values(), strict=True)]
    slower = {
        name: [value / reference - 1 for value, reference in zip(values, least, strict=True)]
        for name, values in makespans.items()
    }
    return {"best_fixed": min(fixed, key=lambda name: mean(fixed[name])), "slower": slower}


def render(results: Mapping[str, Any]) -> list[str]:
    """Return the report in Markdown."""
    selectors = [f"{name}, {order}" for name in SELECTORS for order in ("first", "second")]
    selectors.remove("ThresholdSelector, second")  # it does not learn
    columns, rows = ["K=0", *selectors, "oracle"], []
    for name, result in results["scenarios"].items():
        of = {column: [100 * value for value in result["slower"][column]] for column in columns}
        rows.append([name, result["best_fixed"], *(f"{mean(x):+.1f} ({max(x):+.1f})" for x in of.values())])
    return [
        *heading("Regret of the strategy selectors", dict(results)),
        "Simulated rollouts of 128 responses (8 and 256 where said) of up to 4096 tokens with log-normal lengths,",
        "on the step times of a 7B model with an EAGLE-3 head on an H200 (`StepCosts`). Numbers are percent of",
        "makespan against the best fixed draft length of each seed, known in hindsight; mean over seeds and in",
        "parentheses the worst seed; positive is slower. A selector's first rollout starts from nothing, neither",
        "calibrated nor warmed up; the second goes on with what the first taught it and is told of a new drafter.",
        "The oracle knows the true acceptance and cost of every step. The defaults were tuned on seeds 10 to 30.",
        "",
        *table(["scenario", "best fixed", *columns], rows),
    ]


def main(arguments: Sequence[str]) -> None:
    """Measure, print and write the report."""
    parser = parser_of(__doc__)
    parser.add_argument("--num-seeds", type=int, default=3, help="rollouts of each scenario, with seeds from --seed on")
    args = parser.parse_args(arguments)
    scenarios = dict(list(SCENARIOS.items())[:1]) if args.tiny else SCENARIOS
    seeds = range(args.seed, args.seed + (1 if args.tiny else args.num_seeds))
    record = about("simulated", args.note, args.seed, on_cpu=True)
    results = record | {"scenarios": measure(scenarios, list(seeds))}
    save(args.out / "selector_regret", results, render(results))
    print("\n".join(render(results)))
