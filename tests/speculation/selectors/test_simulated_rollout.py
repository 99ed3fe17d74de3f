"""The simulated rollout: its costs, its luck and its accounts."""

import numpy as np
import pytest

from tests.support.simulations.rollout import RolloutSimulator, StepCosts, Workload, change, constant
from tlt_lightning.speculation import OFF, FixedSelector, SelectorState, Strategy, ThresholdSelector

SMALL = Workload(acceptance={"learned": constant(0.8), "sibling": constant(0.4)}, num_requests=16, max_length=512)


@pytest.mark.parametrize(
    ("batch", "length", "milliseconds"),
    [
        (1, 0, 4.66),
        (128, 7, 28.59),
        (32, 3, 6.75),
        (48, 3, (6.75 + 8.99) / 2),
        (1, 2, (5.24 + 6.17) / 2),
        (192, 0, 6.15),
    ],
)
def test_step_costs_are_the_measured_table_and_its_interpolation(batch, length, milliseconds):
    assert StepCosts().step(batch, Strategy(length), 350.0) == pytest.approx(milliseconds / 1000)


def test_context_costs_and_look_ups_draft_for_nothing():
    costs = StepCosts()
    assert costs.step(8, OFF, 1350.0) - costs.step(8, OFF, 350.0) == pytest.approx(8 * 1000 * 1.3e-8)
    saved = costs.step(8, Strategy(3), 350.0) - costs.step(8, Strategy(3, "sibling"), 350.0)
    assert saved == pytest.approx(0.0014)


def test_every_response_gets_exactly_its_length():
    for selector in (FixedSelector(0), FixedSelector(7), ThresholdSelector(3, max_running=8, band=0)):
        outcome = RolloutSimulator(SMALL).run(selector)
        assert outcome.tokens == SMALL.lengths().sum() == sum(step.num_tokens for step in outcome.trace)
        assert outcome.makespan == pytest.approx(sum(step.seconds for step in outcome.trace))


def test_plain_decoding_takes_as_many_steps_as_the_longest_response():
    trace = RolloutSimulator(SMALL).run(FixedSelector(0)).trace
    assert len(trace) == SMALL.lengths().max()
    sizes = [step.batch_size for step in trace]
    assert sizes[0] == 16
    assert sizes == sorted(sizes, reverse=True)


def test_lengths_have_a_long_tail():
    lengths = Workload(acceptance={}, num_requests=4096).lengths()
    assert np.median(lengths) == pytest.approx(600, rel=0.05)
    assert lengths.mean() > 1.4 * np.median(lengths)


def test_acceptance_is_what_was_asked_for():
    workload = Workload(acceptance={"learned": constant(0.8, 0.5)}, num_requests=512, sigma=0.01)
    trace = RolloutSimulator(workload).run(FixedSelector(3)).trace[:100]
    emitted = sum(step.num_tokens for step in trace) / sum(step.batch_size for step in trace)
    assert emitted == pytest.approx(1 + 0.8 + 0.8 * 0.5 + 0.8 * 0.5 * 0.5, rel=0.02)


def test_longer_drafts_never_need_more_steps_for_the_same_luck():
    steps = [len(RolloutSimulator(SMALL).run(FixedSelector(length)).trace) for length in (0, 1, 3, 7)]
    assert steps == sorted(steps, reverse=True)


def test_same_seed_same_rollout():
    first, second = (RolloutSimulator(SMALL).run(ThresholdSelector(3)) for _ in range(2))
    assert first.trace == second.trace


def test_catch_up_is_paid_once_for_the_tokens_missed():
    class OnAtStep(FixedSelector):
        def __init__(self, step: int) -> None:
            super().__init__(3)
            self.left = step

        def select(self, state: SelectorState) -> Strategy:
            self.left -= 1
            return self.strategy if self.left < 0 else OFF

    costs = StepCosts(catch_up_fixed=2.0, catch_up_token=1.0)
    workload = Workload(acceptance={"learned": constant(0.5)}, num_requests=4, median_length=500, sigma=0.01)
    trace = RolloutSimulator(workload, costs).run(OnAtStep(10)).trace
    extra = [step.seconds - costs.step(4, step.strategy, 200.0) for step in trace[:20]]
    assert extra[10] == pytest.approx(0.002 + 0.001 * 40)
    assert max(extra[:10] + extra[11:]) == pytest.approx(0.0)


def test_profiles_change_when_they_should():
    before, after = constant(0.8, 0.6), constant(0.2, 0.0)
    collapse, drift = change(before, after, 0.5, 0.5), change(before, after, 0.0, 1.0)
    assert list(collapse(0.49)) == [0.8, 0.6]
    assert list(collapse(0.5)) == [0.2, 0.0]
    assert list(drift(0.5)) == pytest.approx([0.5, 0.3])


def test_expected_rate_is_tokens_per_second_of_one_request():
    simulator = RolloutSimulator(SMALL)
    rate = simulator.expected_rate(SelectorState(8, 350.0), Strategy(3))
    assert rate == pytest.approx((1 + 0.8 + 0.64 + 0.512) / 0.0064)
