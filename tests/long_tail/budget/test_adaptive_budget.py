"""The budget of a drafter's training in simulated runs, against the best constant budget."""

import json
from dataclasses import replace
from math import expm1, inf, log

import pytest

from tests.support.simulations.training import World, simulate
from tlt_lightning.drafter.quality import DraftQuality
from tlt_lightning.long_tail.adaptive_budget import AdaptiveBudget
from tlt_lightning.long_tail.budget import FixedBudget, MeasuredIteration
from tlt_lightning.long_tail.publication import Publication

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
        (COLD, -0.05),  # much at first is better than the same share throughout
        (replace(COLD, speed=0.05), -0.06),
        (replace(COLD, price=lambda iteration: 60.0), -0.06),  # training on all tokens takes longer than decoding
        (replace(COLD, lag=0.2), -0.03),  # nothing to see for an iteration
        (replace(COLD, exponent=1.0), -0.09),
        (DRIFT, 0.02),
        (LATER, 0.0),
        (World(drift=lambda iteration: 0.03, price=lambda iteration: 60.0 if iteration >= 30 else 6.0), -0.11),
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
    iterations, late = (0.4, 0.05) if world.skill else (1.7, 0.2)  # of decoding; a cold head is tried for longer
    trial = iterations * none / 100
    assert ours.cost - trial < 0.01 * none
    assert ours.seconds - trial < 1.01 * none
    assert sum(ours.shares[50:]) < late * 50  # nearly nothing, but not nothing


def test_more_is_trained_as_soon_as_the_policy_drifts() -> None:
    shares = simulate(LATER, AdaptiveBudget()).shares
    assert sum(shares[42:62]) > 8 * sum(shares[20:40])


def test_nothing_is_trained_that_no_rollout_is_left_for() -> None:
    assert simulate(COLD, AdaptiveBudget()).shares[-1] == 0


def test_the_first_iteration_has_a_trial_and_later_ones_what_is_in_the_account() -> None:
    budget = AdaptiveBudget(most=0.5, trial=0.5)
    assert budget.decide(0, None) == 0.5
    assert budget.decide(0, 0) is None  # no rollout is left that would use it
    assert budget.limit(elapsed=8.0) == 4.0
    took = MeasuredIteration(
        seconds=10.0, decode_seconds=5.0, cost=2.0, training_seconds=1.0, share=0.5, learned_share=0.0
    )
    budget.note_iteration(took)
    assert budget.limit(elapsed=8.0) == pytest.approx(0.5 * 5.0 + 0.005 * 10 - 2.0)
    budget.note_iteration(replace(took, cost=100.0))
    assert budget.decide(1, None) is None
    assert budget.metrics()["drafter/balance_s"] < 0


def test_a_cold_head_has_a_longer_trial_which_savings_do_not_fill_up_again() -> None:
    budget = AdaptiveBudget(trial=0.5)
    took = MeasuredIteration(seconds=10.0, decode_seconds=5.0, cost=4.0, training_seconds=3.0, share=0.5)
    for expected in (6.05, 2.1, -1.85):
        budget.note_iteration(took)
        assert budget.limit(elapsed=8.0) == pytest.approx(expected)
    for _ in range(200):
        budget.note_iteration(replace(took, cost=0.0))
    assert budget.limit(elapsed=8.0) == 2.5


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


def publication(before: float, after: float, error: float, *, is_published: bool) -> Publication:
    old, new = (DraftQuality((length - 1,), (), (), (), 1) for length in (before, after))
    return Publication(old, new, after - before, after - before - error, is_published, has_diverged=False)


TOOK = MeasuredIteration(seconds=10.0, decode_seconds=8.0, cost=0.5, training_seconds=0.4, share=0.5, learned_share=0.5)


def test_what_was_saved_for_certain_is_paid_into_the_account() -> None:
    budget = AdaptiveBudget(trial=0.5, overhead=0.01, horizon=10)
    assert budget.metrics() == {"drafter/predicted_saving_s": 0.0, "drafter/balance_s": 0.0}
    budget.decide(0, None)
    budget.note_iteration(replace(TOOK, cost=4.0))
    balance = 0.5 * 8 + 0.01 * 10 - 4.0  # the trial, the overhead, less the cost; nothing is saved yet
    assert budget.metrics()["drafter/balance_s"] == pytest.approx(balance)
    budget.note_publication(publication(2.0, 2.2, 0.1, is_published=False))
    budget.note_iteration(TOOK)
    balance += 0.01 * 10 - 0.5
    assert budget.metrics()["drafter/balance_s"] == pytest.approx(balance)
    budget.note_publication(publication(2.0, 2.2, 0.1, is_published=True))  # 0.1 for certain
    budget.note_iteration(TOOK)
    balance += 0.01 * 10 - 0.5 + 8.0 * 0.5 * expm1(0.5 * log(1.05))
    assert budget.metrics()["drafter/balance_s"] == pytest.approx(balance)
    budget.note_iteration(TOOK)
    balance += 0.01 * 10 - 0.5 + 8.0 * 0.5 * expm1(0.5 * log(1.05) * 0.9)  # it fades over the horizon
    assert budget.metrics()["drafter/balance_s"] == pytest.approx(balance)
    budget.note_publication(publication(2.2, 2.2, 0.22, is_published=False))
    budget.note_iteration(TOOK)
    certain = 0.5 * (log(1.05) * 0.9**2 - 0.04 * 0.1)  # less what luck alone would show
    balance += 0.01 * 10 - 0.5 + 8.0 * 0.5 * expm1(certain)
    assert budget.metrics()["drafter/balance_s"] == pytest.approx(balance)
    budget.note_iteration(replace(TOOK, cost=0.0, learned_share=None, seconds=400.0))
    assert budget.metrics()["drafter/balance_s"] == pytest.approx(
        min(4.0, balance + 4.0)
    )  # with the head off it saves nothing


def test_the_account_holds_a_trial_at_most() -> None:
    budget = AdaptiveBudget(trial=0.5, overhead=0.01)
    for _ in range(3):
        budget.note_iteration(replace(TOOK, cost=0.0))
    assert budget.limit(3.0) == 0.5 * TOOK.decode_seconds


def test_idle_windows_cost_nothing_and_are_affordable_without_a_balance() -> None:
    decisions = []
    for idle_share in (0.0, 1.0):
        budget = AdaptiveBudget(trial=0.5)
        took = replace(TOOK, cost=4.01, training_seconds=4.0, share=1.0, idle_share=idle_share)
        budget.note_iteration(took)
        assert 0.01 < budget.limit(0.0) < 0.01 + 4.0 / 2**7
        decisions.append(budget.decide(1, None))
    assert decisions == [None, 1.0]


def settled_budget() -> AdaptiveBudget:
    """One that has measured, without a doubt, that nothing is gained."""
    budget = AdaptiveBudget(overhead=0.05)  # which pays for what is tried
    for _ in range(12):
        budget.note_iteration(replace(TOOK, acceptance=2.0))
        budget.note_publication(publication(2.0, 2.0, 0.001, is_published=False))
    assert budget.decide(12, None) is None
    return budget


@pytest.mark.parametrize(
    ("trained", "hidden", "acceptance", "horizon", "tries"),
    [
        (0.0, 0.0, 1.89, 50, True),
        (0.5, 0.0, 1.89, 50, False),
        (0.5, 0.5, 1.89, 50, False),
        (0.0, 0.0, 1.91, 50, False),
        (0.5, 0.0, 1.89, 11, True),  # no trial within the horizon
    ],
)
def test_acceptance_that_falls_without_training_is_drift_and_tried_anew(
    trained: float, hidden: float, acceptance: float, horizon: int, tries: bool
) -> None:
    budget = settled_budget()
    budget.horizon = horizon
    budget.note_iteration(replace(TOOK, share=trained, idle_share=hidden, acceptance=acceptance))
    assert (budget.decide(13, None) is not None) is tries


def predicted_saving(budget: AdaptiveBudget, iteration: int, remaining: int | None) -> float:
    """Return the seconds that the decision of an iteration expects its training to save."""
    budget.decide(iteration, remaining)
    return budget.metrics()["drafter/predicted_saving_s"]


def test_single_texts_that_show_no_gain_speak_against_it() -> None:
    savings = []
    for is_told in (False, True):
        budget = AdaptiveBudget()
        for _ in range(6):
            budget.note_iteration(replace(TOOK, cost=0.0))
            if is_told:
                budget.note_publication(publication(2.0, 2.0, inf, is_published=False))
        savings.append(predicted_saving(budget, 6, None))
    assert savings[1] < 0.7 * savings[0]


def test_a_trainee_that_starts_over_need_not_show_what_was_hoped_of_its_training() -> None:
    savings = []
    for has_diverged in (False, True):
        budget = AdaptiveBudget()
        for _ in range(3):
            budget.note_iteration(replace(TOOK, cost=0.0))
        same = publication(2.0, 2.0, 0.001, is_published=False)
        for each in (replace(same, has_diverged=has_diverged), same):
            budget.note_publication(each)
        savings.append(predicted_saving(budget, 4, None))
    assert savings[0] < savings[1]


def rested(budget: AdaptiveBudget, *acceptances: float) -> float:
    """Return the balance after iterations that trained nothing and cost nothing."""
    for acceptance in acceptances:
        budget.note_iteration(replace(TOOK, share=0.0, cost=0.0, training_seconds=0.0, acceptance=acceptance))
    return budget.limit(0.0)


def test_drift_shows_against_the_best_that_was_heard_and_once() -> None:
    creeping = settled_budget()
    rested(creeping, 1.96, 1.92)
    assert creeping.decide(13, None) is None
    rested(creeping, 1.88)  # a fall of 6% in all
    assert creeping.decide(14, None) is not None
    for _ in range(12):  # nothing is gained at the new level, either
        creeping.note_iteration(replace(TOOK, acceptance=1.88))
        creeping.note_publication(publication(1.88, 1.88, 0.001, is_published=False))
    rested(creeping, 1.88)
    assert creeping.decide(15, None) is None


def test_drift_is_worth_a_new_trial_once_in_a_horizon() -> None:
    budget = AdaptiveBudget(trial=0.5, overhead=0.0, horizon=10)
    budget.note_iteration(replace(TOOK, cost=6.0, acceptance=2.0))
    assert rested(budget, *[2.0] * 8, 1.8) == 0.5 * 8 - 6.0
    assert rested(budget, 1.7) == 0.5 * 8  # eleven iterations after the first
    budget.note_iteration(replace(TOOK, cost=3.0, learned_share=None, acceptance=1.7))
    assert rested(budget, 1.5) == pytest.approx(0.5 * 8 - 3.0)


def test_a_head_that_is_hardly_asked_is_hardly_worth_training() -> None:
    savings = []
    for learned_share in (1.0, 0.0):
        budget = AdaptiveBudget()
        for _ in range(20):
            budget.note_iteration(replace(TOOK, cost=0.0, training_seconds=0.01, learned_share=learned_share))
        savings.append(predicted_saving(budget, 21, None))
    assert savings[0] > 20 * savings[1]


def test_a_gain_that_the_past_speaks_against_is_not_paid_in_full() -> None:
    paid = []
    for budget in (AdaptiveBudget(overhead=0.0), settled_budget()):
        budget.overhead = 0.0
        budget.note_iteration(replace(TOOK, cost=3.0))
        before = budget.limit(0.0)
        budget.note_publication(publication(2.0, 2.4, 0.1, is_published=True))
        budget.note_iteration(replace(TOOK, cost=0.0, acceptance=2.0))
        paid.append(budget.limit(0.0) - before)
    assert 0 < paid[1] < 0.5 * paid[0]


def test_a_single_text_takes_nothing_from_what_is_certain() -> None:
    balances = []
    for more in ([], [publication(2.2, 2.2, inf, is_published=False)]):
        budget = AdaptiveBudget()
        budget.note_iteration(replace(TOOK, cost=3.0))
        for each in (publication(2.0, 2.2, 0.1, is_published=True), *more):
            budget.note_publication(each)
        budget.note_iteration(TOOK)
        balances.append(budget.limit(0.0))
    assert balances[0] == balances[1]


def test_a_gain_counts_for_the_horizon_where_the_run_is_longer() -> None:
    savings = []
    for remaining in (None, 10, 1000, 3):
        budget = AdaptiveBudget(horizon=10)
        budget.note_iteration(TOOK)
        savings.append(predicted_saving(budget, 1, remaining))
    assert savings[0] == savings[1] == savings[2] > savings[3]


def test_what_training_costs_is_learned_from_iterations_that_trained() -> None:
    """The first may have had too little text to train on; what it took is known all the same."""
    budget = AdaptiveBudget(trial=0.5, overhead=0.0)
    rested(budget, 2.0)
    assert budget.decide(1, None) == 1.0
    for _ in range(2):  # measuring takes long
        budget.note_iteration(replace(TOOK, cost=1.9, training_seconds=0.4, learned_share=0.0))
    assert budget.limit(0.0) == pytest.approx(0.2)
    rested(budget, *[2.0] * 5)  # says nothing of it
    assert budget.decide(7, None) is None


def test_rest_is_doubted_after_four_iterations_and_then_after_twice_as_many() -> None:
    budget, tried = settled_budget(), []
    for iteration in range(13, 40):
        if budget.decide(iteration, None) is not None:
            tried.append(iteration)
            for _ in range(12):
                budget.note_publication(publication(2.0, 2.0, 0.001, is_published=False))
                budget.note_iteration(replace(TOOK, acceptance=2.0))
    assert tried == [16, 25]
