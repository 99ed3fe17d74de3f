"""The budget of a drafter's training in simulated runs, against the best constant budget."""

import json
from dataclasses import replace
from typing import Any

import pytest

from tests.support.simulated_training import World, simulate
from tlt_lightning.long_tail.adaptive_budget import AdaptiveBudget
from tlt_lightning.long_tail.budget import FixedBudget, MeasuredIteration
from tlt_lightning.long_tail.forecast import GainForecast

CONSTANT = (0.0, *(2.0**-number for number in range(8)))
COLD = World()
DRIFT = World(skill=5.0, drift=lambda iteration: 0.1)
SATURATED = World(skill=20.0)
USELESS = World(skill=2.0, speed=0.0)


def constant(world: World) -> dict[float, float]:
    """Seconds of a run under each constant share; 0 never trains."""
    budgets = {share: FixedBudget(share, every_n_iterations=1 if share else 1000) for share in CONSTANT}
    return {share: simulate(world, budget).seconds for share, budget in budgets.items()}


@pytest.mark.parametrize(
    ("world", "regret"),
    [
        (COLD, 0.0),
        (replace(COLD, speed=0.05), 0.0),
        (replace(COLD, price=lambda iteration: 40.0), 0.0),  # training on all tokens takes as long as decoding
        (World(best=3.3, speed=0.15, lag=0.2, price=lambda iteration: 28.0), 0.0),  # nothing to see for an iteration
        (DRIFT, 0.07),
        (World(skill=20.0, drift=lambda iteration: 0.1 if iteration >= 40 else 0.0), 0.02),
        (World(drift=lambda iteration: 0.03, price=lambda iteration: 60.0 if iteration >= 30 else 3.0), 0.0),
        (replace(COLD, idle_share=0.3, drift=lambda iteration: 0.03), 0.01),
        (World(best=2.2, speed=0.2, decode=12.0, price=lambda iteration: 28.0), 0.0),  # as the quickstart on a CPU
    ],
    ids=[
        "cold",
        "cold, slow",
        "cold, dear",
        "cold, late",
        "drift",
        "late drift",
        "price rises",
        "idle windows",
        "quickstart",
    ],
)
def test_training_that_pays_ends_a_run_as_early_as_the_best_constant_budget(world: World, regret: float) -> None:
    seconds = constant(world)
    assert min(seconds.values()) < 0.97 * seconds[0]
    assert simulate(world, AdaptiveBudget()).seconds < (1 + regret) * min(seconds.values())


@pytest.mark.parametrize(
    "world",
    [SATURATED, USELESS, World(speed=0.0), World(usage=0.0)],
    ids=["nothing left to learn", "learns nothing", "cold, learns nothing", "another drafter is better"],
)
def test_training_that_does_not_pay_costs_a_hundredth_of_the_run_after_its_trial(world: World) -> None:
    ours, none = simulate(world, AdaptiveBudget()), constant(world)[0]
    iterations, late = (0.5, 0.05) if world.skill else (2.1, 0.2)  # a cold head is tried for longer
    trial = iterations * none / 100
    assert ours.cost - trial < 0.01 * none
    assert ours.seconds - trial < 1.01 * none
    assert sum(ours.shares[50:]) < late * 50  # nearly nothing, but not nothing


def test_more_is_trained_as_soon_as_the_policy_drifts() -> None:
    world = World(skill=20.0, drift=lambda iteration: 0.2 if iteration >= 50 else 0.0)
    shares = simulate(world, AdaptiveBudget()).shares
    assert sum(shares[52:72]) > 8 * sum(shares[30:50])


def test_nothing_is_trained_that_no_rollout_is_left_for() -> None:
    assert simulate(COLD, AdaptiveBudget()).shares[-1] == 0


def test_the_first_iteration_has_a_trial_and_later_ones_what_is_in_the_account() -> None:
    budget = AdaptiveBudget(most=0.5, trial=0.5)
    assert budget.decide(0, None) == 0.5
    assert budget.limit(elapsed=8.0) == 4.0
    took = MeasuredIteration(
        seconds=10.0, decode_seconds=5.0, cost=4.0, training_seconds=3.0, share=0.5, learned_share=0.0
    )
    budget.note_iteration(took)
    assert budget.limit(elapsed=8.0) == pytest.approx(5.0 + 0.005 * 10 - 4.0)
    budget.note_iteration(replace(took, cost=100.0))
    assert budget.decide(1, None) is None
    assert budget.metrics()["drafter/balance_s"] < 0


def test_a_cold_head_has_a_longer_trial_which_savings_do_not_fill_up_again() -> None:
    budget = AdaptiveBudget(trial=0.5)
    took = MeasuredIteration(seconds=10.0, decode_seconds=5.0, cost=4.0, training_seconds=3.0, share=0.5)
    for expected in (16.05, 12.1, 8.15, 4.2, 0.25):
        budget.note_iteration(took)
        assert budget.limit(elapsed=8.0) == pytest.approx(expected)
    for _ in range(200):
        budget.note_iteration(replace(took, cost=0.0))
    assert budget.limit(elapsed=8.0) == 5.0


def test_a_resumed_run_decides_as_the_uninterrupted_one() -> None:
    class Interrupted(AdaptiveBudget):
        def decide(self, iteration: int, remaining: int | None) -> float | None:
            if iteration == 17:
                saved = json.loads(json.dumps(self.state_dict()))
                self.__init__()  # type: ignore[misc]
                self.load_state_dict(saved)
            return super().decide(iteration, remaining)

    assert simulate(DRIFT, Interrupted(), 30).shares == simulate(DRIFT, AdaptiveBudget(), 30).shares


def test_a_run_goes_on_with_another_budget() -> None:
    budget = AdaptiveBudget(most=0.5)
    budget.load_state_dict(FixedBudget().state_dict())
    assert budget.decide(7, None) == 0.5
    FixedBudget().load_state_dict(budget.state_dict())


def test_gains_that_shrink_foretell_smaller_ones() -> None:
    """What is left of the gap decides on a plan: a head that gained little lately is let alone."""
    shares, costs = [1.0, 0.5], [2.0, 1.0]
    plans = {}
    for gains in ((0.3, 0.3, 0.3), (0.3, 0.05, 0.0)):
        forecast = GainForecast()
        for gain in gains:
            forecast.advance(1.0)
            forecast.observe(gain, 0.01)
            forecast.settle()
        plans[gains] = forecast.plan(shares, costs, decode_seconds=5.0, horizon=10)
    (share, saving), (other, less) = plans.values()
    assert share == 1.0
    assert other is None
    assert saving > 5 > less == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"most": 0}, "`most` must be positive"),
        ({"trial": 0}, "`trial` must be positive"),
        ({"overhead": 1.5}, "`overhead` is a share"),
        ({"horizon": 1}, "`horizon` must be at least 2"),
    ],
)
def test_bad_arguments_name_themselves(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AdaptiveBudget(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"share": -0.1}, "`share` must be at least 0, got -0.1"),
        ({"every_n_iterations": 0}, "`every_n_iterations` must be at least 1"),
    ],
)
def test_bad_arguments_of_a_fixed_budget_name_themselves(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FixedBudget(**arguments)
