"""The budget of a drafter's training in simulated runs, against the best constant budget."""

import json
from collections.abc import Callable
from dataclasses import replace
from math import inf, sqrt

import pytest

from tests.support.simulations.training import World, simulate
from tlt_lightning.drafter.quality import DraftQuality
from tlt_lightning.long_tail.budget import AdaptiveBudget, FixedBudget, MeasuredIteration
from tlt_lightning.long_tail.publishing import PublishDecision

CONSTANT = (0.0, *(2.0**-number for number in range(8)))
COLD = World()
DRIFT = World(skill=3.0, drift=lambda iteration: 0.1, price=lambda iteration: 15.0)
LATER = World(skill=5.0, drift=lambda iteration: 0.1 if iteration >= 40 else 0.0, price=lambda iteration: 6.0)
SATURATED = World(skill=20.0)
USELESS = World(skill=2.0, speed=0.0)


def constant(world: World) -> dict[float, float]:
    """Seconds of a run under each constant share; 0 never trains."""
    budgets = {share: FixedBudget(share, every_n_iterations=1 if share else 1000) for share in CONSTANT}
    return {share: simulate(world, budget).seconds for share, budget in budgets.items()}


@pytest.mark.parametrize(
    ("world", "regret"),
    [
        (COLD, -0.07),  # much at first is better than the same share throughout
        (replace(COLD, speed=0.05), -0.06),
        (replace(COLD, price=lambda iteration: 60.0), -0.07),  # training on all tokens takes longer than decoding
        (replace(COLD, lag=0.2), -0.09),  # nothing to see for an iteration
        (replace(COLD, exponent=1.0), -0.1),
        (DRIFT, 0.02),
        (LATER, 0.0),
        (World(drift=lambda iteration: 0.03, price=lambda iteration: 60.0 if iteration >= 30 else 6.0), -0.15),
        (replace(COLD, idle_share=0.3, drift=lambda iteration: 0.03), 0.01),
    ],
    ids=[
        "cold",
        "cold, slow",
        "cold, dear",
        "cold, late",
        "cold, saves more",
        "drift",
        "late drift",
        "price rises",
        "idle windows",
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
    iterations = 0.4 if world.skill else 1.8  # of decoding; a cold head is tried for longer
    trial = iterations * none / 100
    assert ours.cost - trial < 0.01 * none
    assert ours.seconds - trial < 1.01 * none
    assert sum(ours.shares[50:]) < 0.05 * 50  # nearly nothing, but not nothing


def test_more_is_trained_as_soon_as_the_policy_drifts() -> None:
    shares = simulate(LATER, AdaptiveBudget()).shares
    assert sum(shares[42:62]) > 8 * sum(shares[20:40])


def test_nothing_is_trained_that_no_rollout_is_left_for() -> None:
    assert simulate(COLD, AdaptiveBudget()).shares[-1] == 0
    assert AdaptiveBudget().decide(0, 0) is None


TOOK = MeasuredIteration(seconds=10.0, decode_seconds=8.0, cost=0.5, training_seconds=0.4, share=0.5, learned_share=0.5)


def decision(before: float, after: float, error: float, *, is_published: bool) -> PublishDecision:
    old, new = (DraftQuality((length - 1,), (), (), (), 1) for length in (before, after))
    return PublishDecision(old, new, after - before, after - before - error, is_published, has_diverged=False)


NOTHING = decision(2.0, 2.0, inf, is_published=False)


def test_the_first_iteration_has_a_trial_and_later_ones_what_is_in_the_account() -> None:
    budget = AdaptiveBudget(most=0.5, trial=0.5)
    assert budget.decide(0, None) == 0.5
    assert budget.limit(elapsed=8.0) == 4.0
    took = replace(TOOK, decode_seconds=5.0, cost=2.0, training_seconds=1.9, learned_share=0.0)
    budget.note_iteration(took)
    balance = 0.5 * 5.0 - 2.0  # the account is full: 0.5% of the run find no place in it
    assert budget.metrics()["drafter/balance_s"] == pytest.approx(balance)
    assert budget.limit(elapsed=8.0) == pytest.approx(balance - 0.1)  # less what the decision will take
    budget.note_iteration(replace(took, cost=100.0))
    assert budget.decide(1, None) is None
    assert budget.metrics()["drafter/balance_s"] < 0


def test_a_cold_head_has_a_longer_trial_which_nothing_fills_up_again() -> None:
    budget = AdaptiveBudget(trial=0.5)
    took = MeasuredIteration(seconds=10.0, decode_seconds=5.0, cost=4.0, training_seconds=3.0, share=0.5)
    for expected in (6.0, 2.0, -1.95):
        budget.note_iteration(took)
        assert budget.metrics()["drafter/balance_s"] == pytest.approx(expected)
    for _ in range(200):
        budget.note_iteration(replace(took, cost=0.0))
    assert budget.metrics()["drafter/balance_s"] == 2.5


@pytest.mark.parametrize(("step", "judging", "is_affordable"), [(3.0, 0.9, True), (3.0, 1.1, False), (4.1, 0.0, False)])
def test_what_a_step_and_a_decision_take_is_known_before_they_are_paid(
    step: float, judging: float, is_affordable: bool
) -> None:
    budget = AdaptiveBudget(trial=0.5, overhead=0.0)
    budget.note_costs(step, judging)
    assert budget.limit(elapsed=8.0) == 4.0 - judging
    budget.note_iteration(replace(TOOK, cost=0.0, training_seconds=0.0, share=0.0))
    assert (budget.decide(1, None) is not None) is is_affordable
    assert budget.limit(elapsed=0.0) == 4.0 - judging


def test_a_rest_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    for decision, what in ((0.5, "tried again when 0.5% of the run"), (5.0, "cannot pay on this machine")):
        caplog.clear()
        budget = AdaptiveBudget()
        budget.note_iteration(replace(TOOK, cost=4.5 + decision, training_seconds=4.5))
        for iteration in range(3):
            assert budget.decide(iteration, None) is None
        assert caplog.text.count("The draft head is not trained for now") == caplog.text.count(what) == 1


def test_a_rest_lasts_until_its_share_of_the_run_has_paid_for_what_training_takes() -> None:
    budget, num_rests = AdaptiveBudget(trial=0.5, overhead=0.005), 0
    budget.note_iteration(replace(TOOK, cost=3.5, training_seconds=2.5))  # leaves 0.5 s
    while budget.decide(num_rests, None) is None:
        budget.note_iteration(replace(TOOK, cost=0.0, training_seconds=0.0, share=0.0))
        num_rests += 1
    assert num_rests == 23  # 0.05 s each, for a decision of 1 s and training of an eighth of 5 s


def test_two_decisions_that_do_not_pay_leave_an_eighth_and_one_that_pays_all() -> None:
    budget = AdaptiveBudget(most=2.0, trial=1e3)
    budget.note_iteration(TOOK)
    shares = []
    for each in (NOTHING, NOTHING, NOTHING, decision(2.0, 2.4, 0.1, is_published=True), NOTHING):
        budget.note_decision(each, None)
        shares.append(budget.decide(1, None))
    assert shares == [2.0, 0.25, 0.25, 2.0, 2.0]


@pytest.mark.parametrize(("remaining", "iterations"), [(None, 10), (1000, 10), (4, 5)])
def test_a_gain_saves_the_root_of_its_share_in_half_of_the_iterations_to_come(
    remaining: int | None, iterations: int
) -> None:
    budget = AdaptiveBudget(horizon=10)
    budget.note_iteration(TOOK)
    budget.decide(0, 2)  # of a run that is resumed with another end
    budget.note_decision(decision(2.0, 2.4, 0.1, is_published=False), remaining)
    assert budget.metrics()["drafter/predicted_saving_s"] == 0
    budget.note_decision(decision(2.0, 2.4, 0.1, is_published=True), remaining)  # 0.3 for certain
    saved = 8.0 * 0.5 * (1 - sqrt(2.0 / 2.3)) * iterations / 2
    assert budget.metrics()["drafter/predicted_saving_s"] == pytest.approx(saved)


def test_what_is_saved_is_paid_in_up_to_a_trial() -> None:
    for bound, expected in ((0.05, -5.5 + 8.0 * (1 - sqrt(2 / 2.05)) * 25), (0.8, 4.0)):
        budget = AdaptiveBudget(trial=0.5)
        budget.note_iteration(replace(TOOK, learned_share=1.0, cost=9.5))
        budget.note_decision(decision(2.0, 2.0 + bound, 0.0, is_published=True), None)
        assert budget.metrics()["drafter/balance_s"] == pytest.approx(expected)


def test_a_gain_that_costs_more_than_it_saves_does_not_pay() -> None:
    small = decision(2.0, 2.02, 0.0, is_published=True)  # saves 8 * 0.5% * 25: 1 second
    for cost, idle_share, share in ((0.5, 0.0, 1.0), (1.2, 0.0, 0.125), (0.5, 1.0, 0.125)):
        budget = AdaptiveBudget(trial=1e3)
        budget.note_iteration(replace(TOOK, learned_share=1.0))
        budget.note_decision(small, None)
        for _ in range(2):
            budget.note_iteration(replace(TOOK, learned_share=1.0, cost=cost, idle_share=idle_share))
            budget.note_decision(small, None)
        assert budget.decide(3, None) == share  # tokens of idle windows are worth what they would cost outside


def test_idle_windows_cost_nothing_and_are_affordable_without_a_balance() -> None:
    decisions = []
    for idle_share in (0.0, 1.0):
        budget = AdaptiveBudget(trial=0.5)
        budget.note_costs(step=1.0, decision=0.0)
        budget.note_iteration(replace(TOOK, cost=3.99, training_seconds=3.99, share=1.0, idle_share=idle_share))
        decisions.append(budget.decide(1, None))
    assert decisions == [None, 1.0]


def test_a_head_that_is_hardly_asked_is_hardly_worth_training() -> None:
    savings = []
    for learned_share in (1.0, 0.0, None):  # a cold head may turn out to draft in all of it
        budget = AdaptiveBudget()
        for _ in range(20):
            budget.note_iteration(replace(TOOK, learned_share=learned_share))
        budget.note_decision(decision(2.0, 2.4, 0.1, is_published=True), None)
        savings.append(budget.metrics()["drafter/predicted_saving_s"])
    assert savings[2] == savings[0] > 20 * savings[1]


@pytest.mark.parametrize("make", [AdaptiveBudget, lambda: AdaptiveBudget(most=0.5)])
def test_a_resumed_run_decides_as_the_uninterrupted_one(make: Callable[[], AdaptiveBudget]) -> None:
    class Interrupted(AdaptiveBudget):
        def note_iteration(self, iteration: MeasuredIteration) -> None:
            super().note_iteration(iteration)
            saved = json.loads(json.dumps(self.state_dict()))
            self.__init__(self.most)  # type: ignore[misc]
            self.load_state_dict(saved)

    budget, interrupted = make(), Interrupted(make().most)
    assert simulate(DRIFT, interrupted, 30).shares == simulate(DRIFT, budget, 30).shares
    assert interrupted.metrics() == budget.metrics()


def test_a_run_goes_on_with_another_budget() -> None:
    budget = AdaptiveBudget(most=0.5)
    budget.load_state_dict(FixedBudget().state_dict())
    assert budget.decide(7, None) == 0.5
    FixedBudget().load_state_dict(budget.state_dict())
