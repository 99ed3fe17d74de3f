"""The model of step times: how soon and how well it knows costs it was not told."""

import itertools
import random

import numpy as np
import pytest

from tests.support.simulations.rollout import StepCosts
from tlt_lightning.speculation import OFF, MeasuredStep, Strategy
from tlt_lightning.speculation.selectors.step_time import StepTimeModel

STRATEGIES = (OFF, Strategy(1), Strategy(3), Strategy(5), Strategy(7))
BATCHES = (1, 2, 8, 16, 32, 48, 64, 128)
H200 = StepCosts()


def host_cost(batch: int, strategy: Strategy, context: float) -> float:
    """A small CPU: tokens cost from the first one on, drafting a lot."""
    return 0.003 + 0.0003 * batch * (strategy.num_draft_tokens + 1) + 0.0015 * strategy.num_draft_tokens


def learn(cost, num_steps: int, noise: float = 0.05, seed: int = 0) -> StepTimeModel:
    model, generator = StepTimeModel(("learned",)), random.Random(seed)
    for _ in range(num_steps):
        batch, strategy = generator.choice(BATCHES), generator.choice(STRATEGIES)
        context = generator.uniform(100, 4000)
        model.update(batch, strategy, context, cost(batch, strategy, context) * generator.gauss(1, noise))
    return model


def worst_error(model: StepTimeModel, cost) -> float:
    cases = itertools.product(BATCHES, STRATEGIES, (200.0, 2000.0))
    return max(abs(model.seconds(*case) / cost(*case) - 1) for case in cases)


@pytest.mark.parametrize(("cost", "tolerance"), [(H200.step, 0.1), (host_cost, 0.15)])
def test_costs_are_learned_from_noisy_steps(cost, tolerance):
    assert worst_error(learn(cost, 600), cost) < tolerance


def test_prior_shape_fits_an_h200_after_a_single_step():
    model = StepTimeModel(("learned",))
    model.update(1, OFF, 350.0, H200.step(1, OFF, 350.0))
    cases = itertools.product(BATCHES, STRATEGIES, (350.0,))
    assert max(abs(model.seconds(*case) / H200.step(*case) - 1) for case in cases) < 0.1


def test_scale_comes_from_the_first_step():
    slow, fast = StepTimeModel(("learned",)), StepTimeModel(("learned",))
    slow.update(8, OFF, 350.0, 0.5)
    fast.update(8, OFF, 350.0, 0.005)
    assert slow.seconds(64, Strategy(3), 900.0) == pytest.approx(100 * fast.seconds(64, Strategy(3), 900.0))


@pytest.mark.parametrize("num_steps", [0, 1, 50])
def test_a_step_costs_the_same_however_the_model_is_asked(num_steps: int) -> None:
    model = learn(H200.step, num_steps)
    for batch, context in itertools.product(BATCHES, (0.0, 2000.0)):
        seconds = [model.seconds(batch, strategy, context) for strategy in STRATEGIES]
        assert model.seconds_of_each(batch, STRATEGIES, context) == pytest.approx(seconds, rel=1e-12)
        assert [model.estimate(batch, strategy, context)[0] for strategy in STRATEGIES] == seconds


def test_calibration_beats_the_prior_before_the_first_rollout():
    steps = [MeasuredStep(b, s, 350.0, host_cost(b, s, 350.0)) for b in BATCHES for s in STRATEGIES]
    prior, calibrated = StepTimeModel(("learned",)), StepTimeModel(("learned",))
    prior.update(1, OFF, 350.0, host_cost(1, OFF, 350.0))
    calibrated.calibrate(steps)
    assert worst_error(prior, host_cost) > 0.5
    assert worst_error(calibrated, host_cost) < 0.15


def test_step_times_in_8_bit_are_learned_from_steps_in_8_bit() -> None:
    plain = (3.37, 3.56, 4.35, 4.27, 5.72)  # as measured once; drafting costs what it costs in 16 bit
    saved = [wide - narrow for wide, narrow in zip(H200.plain, plain, strict=True)]
    rows = tuple(tuple(cell - less for cell in row) for row, less in zip(H200.speculative, saved, strict=True))
    narrow = StepCosts(plain=plain, speculative=rows)
    model = StepTimeModel(("learned",))
    model.calibrate(
        [MeasuredStep(b, s, 350.0, narrow.step(b, s, 350.0)) for b in (1, 4, 16, 64, 128) for s in STRATEGIES]
    )
    assert worst_error(model, narrow.step) < 0.13
    assert worst_error(learn(H200.step, 600), narrow.step) > 0.3


def test_pauses_hardly_move_it():
    model = learn(H200.step, 600)
    before = model.seconds(8, Strategy(3), 500.0)
    for _ in range(3):
        model.update(8, Strategy(3), 500.0, 100 * before)
    assert model.seconds(8, Strategy(3), 500.0) < 1.05 * before


def test_a_few_steps_faster_than_measured_are_believed() -> None:
    model, cases = StepTimeModel(("learned",)), [(b, s, 350.0) for b in BATCHES for s in STRATEGIES]
    model.calibrate([MeasuredStep(*case, H200.step(*case) * (1 if case[1].is_off else 3), 0.1) for case in cases])
    true = H200.step(8, Strategy(3), 350.0)
    assert model.seconds(8, Strategy(3), 350.0) > 2.6 * true
    for _ in range(16):
        model.update(8, Strategy(3), 350.0, true)
    assert model.seconds(8, Strategy(3), 350.0) < 1.9 * true


def test_slower_machine_is_followed():
    model = learn(H200.step, 600)
    for _ in range(900):
        model.update(8, Strategy(3), 500.0, 2 * H200.step(8, Strategy(3), 500.0))
    assert model.seconds(8, Strategy(3), 500.0) == pytest.approx(2 * H200.step(8, Strategy(3), 500.0), rel=0.1)


def test_other_shapes_are_not_forgotten_while_one_is_repeated():
    model = learn(H200.step, 600)
    for _ in range(5000):
        model.update(1, OFF, 500.0, H200.step(1, OFF, 500.0))
    seconds, spread = model.estimate(64, Strategy(7), 500.0)
    assert seconds == pytest.approx(H200.step(64, Strategy(7), 500.0), rel=0.1)
    assert spread < 0.1


def test_uncertainty_falls_with_observation_and_is_larger_for_what_was_never_run():
    model = StepTimeModel(("learned", "sibling"))
    _, before = model.estimate(8, Strategy(3), 500.0)
    for _ in range(50):
        model.update(8, Strategy(3), 500.0, 0.006)
    _, after = model.estimate(8, Strategy(3), 500.0)
    _, other = model.estimate(8, Strategy(3, "sibling"), 500.0)
    assert after < before / 5
    assert other > 3 * after


def test_drafters_have_costs_of_their_own():
    model, generator = StepTimeModel(("learned", "sibling")), random.Random(0)
    for _ in range(600):
        batch = generator.choice(BATCHES)
        strategy = Strategy(generator.choice((1, 3, 5)), generator.choice(("learned", "sibling")))
        model.update(batch, strategy, 350.0, H200.step(batch, strategy, 350.0))
    for drafter in ("learned", "sibling"):
        strategy = Strategy(5, drafter)
        assert model.seconds(8, strategy, 350.0) == pytest.approx(H200.step(8, strategy, 350.0), rel=0.08)


@pytest.mark.parametrize(
    ("batch", "strategy", "context", "seconds", "error"),
    [
        (1, OFF, 0.0, 1.0007, 0.600),
        (1, Strategy(3), 1000.0, 1.3355, 0.654),
        (8, Strategy(5, "mixed"), 1000.0, 1.5875, 0.806),
        (40, Strategy(3, "ngram"), 2000.0, 1.4676, 1.462),
        (100, Strategy(3, "sibling"), 2000.0, 2.8932, 2.162),
    ],
)
def test_what_is_believed_of_a_machine_that_was_never_timed(
    batch: int, strategy: Strategy, context: float, seconds: float, error: float
) -> None:
    """In plain steps at batch size 1, from the module's priors: look-ups cost the host little, and little is sure."""
    model = StepTimeModel(("learned", "mixed", "ngram", "sibling"))
    assert model.estimate(batch, strategy, context) == (
        pytest.approx(seconds, abs=1e-4),
        pytest.approx(error, abs=1e-3),
    )


def test_a_token_may_cost_more_from_the_knees_on() -> None:
    seconds = [StepTimeModel(("learned",)).seconds(batch, OFF, 0.0) for batch in range(1, 400)]
    slopes = [after - before for before, after in itertools.pairwise(seconds)]
    kinks = [batch for batch, (a, b) in enumerate(itertools.pairwise(slopes), start=2) if b > a + 1e-6]
    assert kinks == [64, 128, 256]


def bayesian_regression(
    rows: np.ndarray, ratios: np.ndarray, noise: float, weights: np.ndarray, covariance: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The posterior mean and covariance of a linear model's weights, in one piece (Bishop 2006, equation 3.50)."""
    precision = np.linalg.inv(covariance) + rows.T @ rows / noise**2
    posterior = np.linalg.inv(precision)
    return posterior @ (np.linalg.inv(covariance) @ weights + rows.T @ ratios / noise**2), posterior


def test_without_forgetting_an_update_is_bayesian_regression() -> None:
    model, noise = StepTimeModel(("learned", "sibling"), window=10**12), 0.3
    model.update(1, OFF, 350.0, 0.005)
    for case in ((8, Strategy(3), 500.0), (200, Strategy(5, "sibling"), 90.0), (3, Strategy(1), 4000.0)):
        weights, covariance = model._weights.copy(), model._covariance.copy()
        features = model.features(*case)
        row = features / (features @ weights)  # in units of what was predicted
        model.update(*case, 0.9 * model.seconds(*case), noise)
        mean, spread = bayesian_regression(row[None], np.array([0.9]), noise, weights, covariance)
        np.testing.assert_allclose(model._weights, mean, rtol=1e-6, atol=1e-12)
        np.testing.assert_allclose(model._covariance, spread, rtol=1e-4, atol=1e-12)
        seconds, error = model.estimate(*case)
        assert seconds == pytest.approx(model.scale * (features @ mean))
        assert error == pytest.approx(np.sqrt(features @ spread @ features) / (features @ mean), rel=1e-4)


def test_impossible_time_is_refused():
    with pytest.raises(ValueError, match="`seconds` of a step must be positive, got 0"):
        StepTimeModel(("learned",)).update(1, OFF, 0.0, 0.0)
