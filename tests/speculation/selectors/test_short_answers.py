"""A head that never pays, where answers are so short that each probe is a large part of a rollout."""

from statistics import mean

import pytest

from tests.support.simulations.short_answers import ShortAnswers
from tlt_lightning.speculation import CostModelSelector
from tlt_lightning.speculation.strategy import Drafter

COSTS = {
    "cpu": {"plain": 0.14, "pass_cost": 0.8, "draft_cost": 0.35, "verify_cost": 0.15, "catch_up": 0.5},
    "cpu, dear head": {"plain": 0.14, "pass_cost": 3.0, "draft_cost": 0.5, "verify_cost": 0.15, "catch_up": 4.0},
    "gpu": {"plain": 0.004, "pass_cost": 0.1, "draft_cost": 0.1, "verify_cost": 0.005, "catch_up": 0.5},
    "gpu, long catch-up": {"plain": 0.004, "pass_cost": 0.1, "draft_cost": 0.1, "verify_cost": 0.005, "catch_up": 3.0},
}


@pytest.mark.parametrize("is_new", [False, True], ids=["one head", "a new head in each iteration"])
@pytest.mark.parametrize("drafters", [("learned",), ("learned", "mixed", "sibling")])
@pytest.mark.parametrize("costs", COSTS)
def test_from_the_third_iteration_on_a_useless_head_costs_2_percent_at_most(
    costs: str, drafters: tuple[Drafter, ...], is_new: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = ShortAnswers(CostModelSelector(drafters=drafters), **COSTS[costs])
    answers.calibrate(monkeypatch)
    slowness = []
    for iteration in range(30):
        if is_new or not iteration:
            answers.control.weights_changed(iteration)
        slowness.append(answers.rollout())
    assert mean(slowness[2:12]) < 1.02
    assert mean(slowness[2:]) < 1.02
