"""Catch-up, probes and reachable arms of the cost-model selector."""

import random
from itertools import pairwise

import pytest

from tests.support.simulations.rollout import RolloutSimulator, StepCosts, Workload, constant
from tlt_lightning.speculation import OFF, CostModelSelector, MeasuredStep, SelectorState, Strategy
from tlt_lightning.speculation.strategy import Drafter

COSTS = StepCosts()


def calibrated(factor: float = 1.0, error: float = 0.02, **arguments) -> CostModelSelector:
    """A selector for which every arm but off took `factor` times its true cost when it was measured."""
    selector = CostModelSelector(**arguments)
    costs = {(b, a): COSTS.step(b, a, 350.0) for b in COSTS.batch_sizes for a in selector.arms(1)}
    selector.calibrate(
        [MeasuredStep(b, arm, 350.0, cost * (1 if arm.is_off else factor), error) for (b, arm), cost in costs.items()]
    )
    return selector


def run(selector: CostModelSelector, chance: float, num_steps: int, batch: int = 8, catch_up: float = 0.0):
    """Steps with true costs; a step that switches the learned drafter on takes `catch_up` seconds more."""
    generator, state, chosen, was_on = random.Random(0), SelectorState(batch, 350.0), [], True
    for _ in range(num_steps):
        arm = selector.select(state)
        is_on = arm.is_learned
        seconds = COSTS.step(batch, arm, 350.0) + (catch_up if is_on and not was_on else 0.0)
        was_on = is_on
        emitted = []
        for _ in range(batch):
            accepted = 0
            while accepted < arm.num_draft_tokens and generator.random() < chance:
                accepted += 1
            emitted.append(accepted + 1)
        selector.record(state, arm, tuple(emitted), seconds)
        chosen.append(arm)
    return chosen


def test_arms_stay_within_the_token_limit():
    selector = CostModelSelector(num_draft_tokens=(1, 3, 7), max_batch_tokens=256)
    assert [arm.num_draft_tokens for arm in selector.arms(32)] == [0, 1, 3, 7]
    assert [arm.num_draft_tokens for arm in selector.arms(33)] == [0, 1, 3]
    assert [arm.num_draft_tokens for arm in selector.arms(128)] == [0, 1]
    assert selector.arms(129) == (OFF,)


def test_calibrated_selector_starts_near_the_best_arm():
    first = calibrated().select(SelectorState(1, 350.0))
    assert first.num_draft_tokens in (1, 3)  # at the prior acceptance of 0.6


def test_catch_up_is_learned_from_the_steps_after_switching_on():
    selector = calibrated()
    run(selector, 0.02, 400, catch_up=0.05)
    chosen = run(selector, 0.9, 3000, catch_up=0.05)
    assert chosen[-1] != OFF
    assert selector.catch_up_seconds > 0.015
    assert selector.step_time.seconds(8, Strategy(3), 350.0) == pytest.approx(0.0064, rel=0.1)


def test_catch_up_that_never_pays_off_keeps_the_drafter_off():
    selector = calibrated(catch_up_seconds=10.0, exploration=0.0)
    selector.select(SelectorState(600, 350.0))  # beyond the token limit: off, and the drafter goes cold
    assert set(run(selector, 0.9, 200)) == {OFF}
    ready = calibrated(exploration=0.0)
    ready.select(SelectorState(600, 350.0))
    assert OFF not in run(ready, 0.9, 200)


def test_a_new_head_is_doubted_alone_and_mixed():
    selector = calibrated(drafters=("learned", "mixed"))
    for drafter in selector.acceptance:
        for _ in range(100):
            selector.record(SelectorState(8, 350.0), Strategy(3, drafter), (3, 1) * 4, 0.006)
    known = {name: acceptance.expected_emitted(3, 1.0) for name, acceptance in selector.acceptance.items()}
    selector.select(SelectorState(8, 350.0, drafter_version=1))
    selector.select(SelectorState(8, 350.0, drafter_version=2))
    for name, acceptance in selector.acceptance.items():
        assert acceptance.expected_emitted(3, 1.0) > known[name]


@pytest.mark.parametrize(("drafter", "is_used"), [("learned", True), ("mixed", True), ("sibling", False)])
def test_a_new_head_is_as_good_as_it_was_measured_and_look_ups_stay_as_they_were(
    drafter: Drafter, is_used: bool
) -> None:
    selector = calibrated(drafters=(drafter,), exploration=0.0)
    assert set(run(selector, 0.02, 400)[-100:]) == {OFF}
    selector.note_head([0.8, 0.64, 0.5, 0.4, 0.3, 0.2, 0.1])
    arm = selector.select(SelectorState(8, 350.0, drafter_version=1))
    assert (not arm.is_off) is is_used


@pytest.mark.parametrize(
    ("accepted", "pays"),
    [([0.003], False), ([0.1, 0.01], False), ([0.3, 0.1, 0.03], True), ([0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3], True)],
)
def test_a_head_pays_that_is_faster_than_plain_decoding_by_measured_steps(accepted: list[float], pays: bool) -> None:
    """On an H200 the cheapest arm, one draft at batch size 1, takes 1.12 times as long as a plain step."""
    speedup = calibrated().expected_speedup(accepted)
    assert speedup is not None
    assert (speedup > 1.05) is pays
    assert CostModelSelector().expected_speedup(accepted) is None  # nothing was measured


def test_a_head_that_may_pay_is_tried_where_steps_were_measured_badly() -> None:
    exact, vague = (calibrated(error=error).expected_speedup([0.1, 0.01]) for error in (0.02, 1.0))
    assert exact is not None
    assert vague is not None
    assert exact < 1.05 < vague


def test_a_draft_of_one_token_gains_nothing_of_those_that_would_come_after_it() -> None:
    selector = calibrated(num_draft_tokens=(1,))
    assert selector.expected_speedup([0.9, 0.8, 0.7]) == selector.expected_speedup([0.9])


def test_the_first_step_is_plain_for_other_steps_are_compared_with_it() -> None:
    selector = CostModelSelector()
    assert selector.select(SelectorState(8, 350.0)) == OFF
    selector.record(SelectorState(8, 350.0), OFF, (1,) * 8, 0.005)
    assert selector.select(SelectorState(8, 350.0)) != OFF


def test_cold_heads_draft_neither_alone_nor_mixed():
    selector = calibrated(drafters=("learned", "mixed", "sibling"))
    rates = selector.expected_rates(SelectorState(8, 350.0, is_silenced=True))
    assert {arm.drafter for arm in rates if not arm.is_off} == {"sibling"}


def test_model_free_drafter_needs_no_catch_up():
    selector = calibrated(drafters=("sibling",), catch_up_seconds=10.0, exploration=0.0)
    selector.select(SelectorState(600, 350.0))
    assert OFF not in run(selector, 0.9, 100)


def test_probes_cost_no_more_than_their_share():
    with_probes, without = calibrated(exploration=0.02), calibrated(exploration=0.0)
    for selector in (with_probes, without):
        run(selector, 0.02, 300)
    chosen = {share: run(selector, 0.02, 3000) for share, selector in ((0.02, with_probes), (0.0, without))}
    assert set(chosen[0.0]) == {OFF}
    seconds = sum(COSTS.step(8, arm, 350.0) for arm in chosen[0.02])
    plain = len(chosen[0.02]) * COSTS.step(8, OFF, 350.0)
    assert 1.002 * plain < seconds < 1.03 * plain


def test_arms_that_were_measured_much_too_slow_are_found_out() -> None:
    chosen = run(calibrated(factor=3.0, error=0.1), 0.8, 1250, catch_up=0.003)
    assert chosen[:100] == [OFF] * 100
    assert OFF not in chosen[-50:]


def test_probe_is_held_for_its_length():
    chosen = run(calibrated(exploration=0.05), 0.02, 3000)[500:]
    lengths, current = [], 0
    for arm in chosen:
        if arm.is_off and current:
            lengths.append(current)
        current = 0 if arm.is_off else current + 1
    assert lengths
    assert {8} <= set(lengths) <= {2, 8, 10, 16, 24}  # a check is shorter, for want of budget


def test_whether_to_probe_is_decided_every_eighth_step() -> None:
    selector, left = calibrated(exploration=0.0), []
    for _ in range(24):
        run(selector, 0.02, 1)
        left.append(selector.state_dict()["probe"][1])
    assert left == [7, 6, 5, 4, 3, 2, 1, 0] * 3


def test_a_probe_ends_when_its_head_is_silenced() -> None:
    selector = calibrated(exploration=0.05)
    run(selector, 0.02, 500)
    assert any(not run(selector, 0.02, 1)[0].is_off for _ in range(1000))  # until it probes
    assert selector.select(SelectorState(8, 350.0, is_silenced=True)) == OFF


def test_better_drafter_is_found():
    workload = Workload(
        acceptance={"learned": constant(0.3), "sibling": constant(0.8)}, num_requests=32, max_length=2048
    )
    trace = RolloutSimulator(workload).run(CostModelSelector(drafters=("learned", "sibling"))).trace
    tail = trace[len(trace) // 4 :]
    assert sum(step.strategy.drafter == "sibling" and not step.strategy.is_off for step in tail) > 0.9 * len(tail)


def test_margin_keeps_equal_arms_from_alternating():
    workload = Workload(acceptance={"learned": constant(0.5)}, num_requests=40, sigma=0.01, max_length=1024)

    def switches(margin: float) -> int:
        trace = RolloutSimulator(workload).run(CostModelSelector(margin=margin, exploration=0.0)).trace
        return sum(a.strategy != b.strategy for a, b in pairwise(trace))

    assert switches(0.05) < switches(0.0)


@pytest.mark.parametrize(
    ("excess", "settling", "charged", "goes_on"),
    [
        (0.05, 0, 0.0, True),  # the noise of a step
        (0.5, 0, 0.4, True),
        (1.5, 0, 1.4, False),  # an arm that is twice as slow as believed
        (9.0, 0, 2.0, False),  # a pause
        (1.5, 2, 1.15, True),  # a catch-up, which the probe's price holds
        (1.5, 1, 1.4, True),
    ],
)
def test_a_probe_pays_for_what_it_takes_beyond_its_price(
    excess: float, settling: int, charged: float, goes_on: bool
) -> None:
    """In times of its step, which stands for two."""
    selector, state, arm = calibrated(exploration=0.0), SelectorState(8, 350.0, num_steps=2), Strategy(3)
    expected = selector.step_time.seconds(8, arm, 350.0)
    selector.load_state_dict(
        selector.state_dict()
        | {"current": [3, "learned"], "probe": [True, 6, 1.0], "settling": [settling, 0.0]}
        | {"catch_up_seconds": 0.25 * expected}
    )
    selector.record(state, arm, (1,) * 8, expected * (1 + excess))
    _, until_decision, credit = selector.state_dict()["probe"]
    assert credit == pytest.approx(1.0 - charged * 2 * expected)
    assert until_decision == (6 if goes_on else 0)
