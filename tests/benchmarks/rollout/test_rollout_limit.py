"""The model of the limit, on rollouts whose costs and acceptance are known."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from benchmarks.rollout.arms import KS
from benchmarks.rollout.limit import model
from benchmarks.rollout.steps import Row, summarize
from tests.support.simulations.rollout import Outcome, RolloutSimulator, StepCosts, Workload, constant
from tlt_lightning.speculation import OFF, FixedSelector, SelectorState, Strategy

CHANCES = (0.8, 0.75, 0.7, 0.65, 0.6, 0.55, 0.5)
LENGTHS = tuple(
    Workload(acceptance={}, num_requests=128, median_length=150, max_length=1500, seed=3).lengths().tolist()
)
WORKLOAD = Workload(acceptance={"learned": constant(*CHANCES)}, num_requests=128, recorded=LENGTHS, seed=11)
COSTS = StepCosts(context_token=0.0)
PROMPTS = 0.25


class Oracle(FixedSelector):
    """Knows the true acceptance and cost of every step of `simulator`, and takes the best arm."""

    def __init__(self, simulator: RolloutSimulator) -> None:
        super().__init__(max(KS))
        self.simulator = simulator

    def select(self, state: SelectorState) -> Strategy:
        return max((OFF, *map(Strategy, KS)), key=lambda arm: self.simulator.expected_rate(state, arm))


def as_run(outcome: Outcome) -> dict[str, Any]:
    """What a benchmark's engine would report of a simulated rollout."""
    rows = [Row(PROMPTS, 128, 0, 128)]
    for step, after in zip(outcome.trace, [*outcome.trace[1:], None], strict=True):
        before = rows[-1]
        running = 0 if after is None else after.batch_size
        rows.append(Row(before.elapsed + step.seconds, running, 0, before.tokens + step.num_tokens))
    kept = {f"acceptance_rate_pos_{k}": float(np.prod(CHANCES[:k])) for k in range(1, 8)}
    return summarize(rows, 128, PROMPTS + outcome.makespan, outcome.tokens) | kept


@pytest.fixture(scope="module")
def arms() -> dict[str, list[dict[str, Any]]]:
    simulator = RolloutSimulator(WORKLOAD, COSTS)
    runs = {"plain": [as_run(simulator.run(FixedSelector(0)))]}
    return runs | {f"K={k}": [as_run(simulator.run(FixedSelector(k)))] for k in KS}


@pytest.mark.slow
def test_the_model_finds_the_limit_and_the_arms_it_was_made_from(arms: dict[str, list[dict[str, Any]]]) -> None:
    found = model(arms, LENGTHS)
    truths = []
    for seed in range(5):
        simulator = RolloutSimulator(replace(WORKLOAD, seed=seed), COSTS)
        truths.append(simulator.run(Oracle(simulator)).makespan + PROMPTS)
    assert found["limit_seconds"] == pytest.approx(np.mean(truths), rel=0.03)
    for name, seconds in found["modelled_seconds"].items():
        assert seconds == pytest.approx(found["measured_seconds"][name], rel=0.05)
        assert seconds > 0.99 * found["limit_seconds"]  # the best step is not always the best for the makespan


def test_the_table_covers_all_batches_and_drafts_less_in_larger_ones(arms: dict[str, list[dict[str, Any]]]) -> None:
    ranges = model(arms, LENGTHS)["best_k"]
    assert ranges[0][0] == 1
    assert ranges[-1][1] == 128
    assert all(before[1] + 1 == after[0] for before, after in pairwise(ranges))
    lengths = [k for *_, k in ranges]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] >= 5
    assert lengths[-1] <= 1


def test_a_missing_arm_is_an_error(arms: dict[str, list[dict[str, Any]]]) -> None:
    with pytest.raises(ValueError, match=r"lacks runs of \['K=5'\]"):
        model({name: runs for name, runs in arms.items() if name != "K=5"}, LENGTHS)
