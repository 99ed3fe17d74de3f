"""What the hypotheses foretell, before and after evidence."""

from math import isfinite

import pytest

from tlt_lightning.long_tail.forecast import GainForecast


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


def test_forecasts_are_those_of_the_weighted_hypotheses() -> None:
    """The numbers of the module's grid, before and after evidence; no hypothesis gains more than its gap."""
    forecast, shares = GainForecast(), [1.0, 0.25]
    assert forecast.plan(shares, [1.0, 0.25], 5.0, 20) == (1.0, pytest.approx(17.1960, abs=1e-4))  # once, then less
    forecast.advance(0.5)
    assert forecast.observe(0.1, 0.02) == pytest.approx(0.109499, abs=1e-6)
    assert forecast.plan(shares, [1.0, 0.25], 5.0, 20) == (1.0, pytest.approx(17.3713, abs=1e-4))
    forecast.advance(1.0)
    assert forecast.observe(0.15, 0.0) == pytest.approx(0.173821, abs=1e-6)
    assert forecast.plan(shares, [3.0, 0.75], 5.0, 20) == (0.25, pytest.approx(7.9334, abs=1e-4))
    assert forecast.plan([1.0], [0.0], 5.0, 3) == (1.0, pytest.approx(1.3484, abs=1e-4))  # in all three rollouts
    assert forecast.plan([], [], 5.0, 20) == forecast.plan(shares, [1.0, 0.25], 5.0, 0) == (None, 0.0)
    assert forecast.plan(shares, [0.0, 0.0], 5.0, 1)[0] == 1.0  # one rollout is left to gain in


def test_evidence_that_no_hypothesis_foretells_leaves_a_forecast() -> None:
    forecast = GainForecast()
    for _ in range(200):
        forecast.advance(1.0)
        assert 0 <= forecast.observe(9.0, 0.0) < 1
        forecast.settle()
    assert isfinite(forecast.plan([1.0], [0.1], 5.0, 10)[1])
