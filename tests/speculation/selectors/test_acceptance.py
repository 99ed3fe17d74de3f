"""Acceptance by position, estimated from emitted tokens."""

import random

import pytest

from tlt_lightning.speculation.selectors.acceptance import AcceptanceEstimator


def emit(generator: random.Random, chances: tuple[float, ...], num_requests: int) -> tuple[int, ...]:
    emitted = []
    for _ in range(num_requests):
        accepted = 0
        while accepted < len(chances) and generator.random() < chances[accepted]:
            accepted += 1
        emitted.append(accepted + 1)
    return tuple(emitted)


def test_chances_of_every_position_are_recovered():
    estimator, generator = AcceptanceEstimator(4, window=1000), random.Random(0)
    chances = (0.9, 0.6, 0.8, 0.3)
    for _ in range(1000):
        estimator.update(4, emit(generator, chances, 16))
    for position, chance in enumerate(chances, 1):
        assert estimator.probability(position) == pytest.approx(chance, abs=0.03)
    expected = 1 + 0.9 + 0.9 * 0.6 + 0.9 * 0.6 * 0.8 + 0.9 * 0.6 * 0.8 * 0.3
    assert estimator.expected_emitted(4) == pytest.approx(expected, rel=0.03)


def test_one_update_by_hand():
    estimator = AcceptanceEstimator(2, window=10)
    estimator.update(2, (1, 2, 3, 3))  # position 1: 3 of 4 accepted; position 2: 2 of 3
    assert estimator.probability(1) == pytest.approx((4 * 0.6 + 3) / 8)
    own = (4 * 0.6 + 2) / 7
    assert estimator.probability(2) == pytest.approx((3 * own + 4 * 0.675) / 7)


def test_of_two_updates_the_first_counts_less_by_one_part_in_the_window() -> None:
    estimator = AcceptanceEstimator(1, window=10)
    estimator.update(1, (2, 2, 2, 2))
    estimator.update(1, (1, 1, 1, 1))
    first, count = (4 * 0.6 + 4) / 8, 4 * 0.9 + 4
    assert estimator.probability(1) == pytest.approx(first - 4 * first / (count + 4))


def test_positions_never_tried_are_like_the_one_before():
    estimator, generator = AcceptanceEstimator(7), random.Random(0)
    for _ in range(200):
        estimator.update(2, emit(generator, (0.9, 0.5), 8))
    assert estimator.probability(7) == pytest.approx(estimator.probability(2))
    assert estimator.probability(7) == pytest.approx(0.5, abs=0.1)


def test_positions_not_tried_any_more_change_like_the_last_one_that_is():
    estimator, generator = AcceptanceEstimator(3), random.Random(0)
    for _ in range(200):
        estimator.update(3, emit(generator, (0.3, 0.2, 0.2), 16))
    for _ in range(200):
        estimator.update(1, emit(generator, (0.9,), 16))
    assert estimator.probability(3) == pytest.approx(0.8, abs=0.15)
    for _ in range(200):
        estimator.update(1, emit(generator, (0.3,), 16))
    assert estimator.probability(3) == pytest.approx(0.2, abs=0.1)


def test_change_is_followed_within_the_window():
    estimator = AcceptanceEstimator(1, window=50)
    for _ in range(500):
        estimator.update(1, (2,) * 8)
    for _ in range(50):
        estimator.update(1, (1,) * 8)
    assert estimator.probability(1) < 0.4
    for _ in range(150):
        estimator.update(1, (1,) * 8)
    assert estimator.probability(1) < 0.05


def test_steps_that_try_nothing_widen_the_uncertainty_and_keep_the_estimate():
    estimator = AcceptanceEstimator(3, window=50)
    for _ in range(100):
        estimator.update(3, (1,) * 8)
    mean, hoped = estimator.expected_emitted(3), estimator.expected_emitted(3, 1.0)
    for _ in range(500):
        estimator.update(0, (1,) * 8)
    assert estimator.expected_emitted(3) == pytest.approx(mean)
    assert estimator.expected_emitted(3, 1.0) > hoped + 0.2


def test_doubt_widens_the_uncertainty_at_once():
    estimator = AcceptanceEstimator(1)
    for _ in range(100):
        estimator.update(1, (1, 2))
    mean, hoped = estimator.probability(1), estimator.probability(1, 1.0)
    estimator.doubt()
    assert estimator.probability(1) == mean
    assert estimator.probability(1, 1.0) > hoped + 0.1


def test_a_doubted_chance_is_known_as_little_as_the_prior() -> None:
    estimator = AcceptanceEstimator(1)
    for _ in range(100):
        estimator.update(1, (1, 2))
    estimator.doubt()
    mean = estimator.probability(1)
    assert estimator.probability(1, 1.0) == pytest.approx(mean + ((mean * (1 - mean) + 1 / 4) / 4) ** 0.5)


def test_chances_stay_chances():
    estimator = AcceptanceEstimator(3)
    for _ in range(100):
        estimator.update(3, (4,))
    assert estimator.probability(1, 5.0) == 1.0
    assert 0.9 < estimator.probability(1) <= 1.0
    assert estimator.expected_emitted(3, 5.0) == 4.0


def test_a_restored_state_is_in_force_at_once() -> None:
    estimator, again = AcceptanceEstimator(2), AcceptanceEstimator(2)
    estimator.update(2, (1, 2, 3, 3))
    assert again.probability(1) != estimator.probability(1)
    again.load_state_dict(estimator.state_dict())
    assert [again.probability(k) for k in (1, 2)] == [estimator.probability(k) for k in (1, 2)]


def test_what_was_measured_of_a_new_head_is_believed_until_other_things_are_seen() -> None:
    estimator = AcceptanceEstimator(longest_draft=3)
    assert estimator.probability(1) == 0.6
    estimator.expect([0.8, 0.0, 0.0])
    assert [estimator.probability(position) for position in (1, 2, 3)] == pytest.approx([0.8, 0.07, 0.01], abs=0.01)
    estimator.expect([0.8, 0.4, 0.0])
    assert [estimator.probability(position) for position in (1, 2, 3)] == pytest.approx([0.8, 0.51, 0.05], abs=0.05)
    assert estimator.expected_emitted(3) == pytest.approx(2.2, abs=0.1)
    for _ in range(50):
        estimator.update(1, (1,) * 4)
    assert estimator.probability(1) < 0.05


def test_a_later_draft_that_fewer_texts_have_may_have_been_accepted_more_often() -> None:
    estimator = AcceptanceEstimator(longest_draft=3)
    estimator.expect([0.4, 0.6, 0.3])
    assert [estimator.probability(position) for position in (1, 2, 3)] == pytest.approx([0.4, 1, 0.5], abs=0.06)
