"""Buckets, pulls and windows of the bandit."""

import pytest

from tlt_lightning.speculation import OFF, BEGMABSelector, SelectorState, Strategy
from tlt_lightning.speculation.selectors import beg_mab


def pull(selector: BEGMABSelector, batch: int, rates: dict[int, float]) -> Strategy:
    """One step in which the arm with draft length K emits `rates[K]` tokens per second and request."""
    state = SelectorState(batch)
    arm = selector.select(state)
    emitted = (1,) * batch
    selector.record(state, arm, emitted, 1 / rates[arm.num_draft_tokens])
    return arm


def test_every_bucket_has_two_arms_at_least_and_its_own_budgets():
    selector = BEGMABSelector()
    assert [len(selector.arms(batch)) for batch in (1, 48, 49, 1000)] == [4, 4, 3, 3]


def test_every_arm_is_pulled_before_the_best_is():
    selector = BEGMABSelector(groups=((3, 1),), thresholds=(1,), epsilon=0.0)
    rates = {0: 1.0, 1: 3.0, 3: 2.0}
    pulled = [pull(selector, 16, rates).num_draft_tokens for _ in range(30)]
    assert sorted(pulled[:5]) == [0, 0, 0, 1, 3]
    assert set(pulled[5:]) == {1}


def test_arm_that_was_unlucky_once_is_pulled_again_and_a_hopeless_one_is_not():
    selector = BEGMABSelector(groups=((5, 3, 1),), thresholds=(1,), epsilon=0.0)
    for _ in range(6):
        pull(selector, 16, {0: 2.0, 1: 3.0, 3: 2.8, 5: 1.0})
    pulled = [pull(selector, 16, {0: 2.0, 1: 3.0, 3: 3.4, 5: 9.0}).num_draft_tokens for _ in range(40)]
    assert pulled.index(3) < 10
    assert set(pulled[10:]) == {3}


def test_statistics_are_shared_across_the_batch_sizes_of_a_bucket():
    selector = BEGMABSelector(groups=((3, 1), (1,)), thresholds=(1, 33), epsilon=0.0)
    for _ in range(6):
        pull(selector, 16, {0: 1.0, 1: 3.0, 3: 2.0})
    assert selector.select(SelectorState(30)).num_draft_tokens == 1
    assert selector.values(2) == pytest.approx({OFF: 1.0, Strategy(1): 3.0, Strategy(3): 2.0})
    assert selector.values(33) == {}


def test_rewards_of_different_batch_sizes_compare():
    # The paper's tokens per second would favour off, pulled at the larger batch.
    selector = BEGMABSelector(groups=((3,),), thresholds=(1,), epsilon=0.0)
    pulled = [pull(selector, batch, {0: 1.0, 3: 2.0}).num_draft_tokens for batch in (64, 16, 64, 64)]
    assert pulled == [0, 3, 0, 0]
    assert pull(selector, 16, {0: 1.0, 3: 2.0}) == Strategy(3)


def test_pull_lasts_until_enough_requests_were_stepped():
    selector = BEGMABSelector(groups=((3,),), thresholds=(1,), pull_size=12)
    arms = [pull(selector, 4, {0: 1.0, 3: 2.0}) for _ in range(6)]
    assert len(set(arms[:3])) == len(set(arms[3:])) == 1
    assert arms[0] != arms[3]
    assert selector.values(4) == pytest.approx({OFF: 1.0, Strategy(3): 2.0})


def test_pull_ends_with_its_bucket():
    selector = BEGMABSelector(groups=((3,), (1,)), thresholds=(1, 33), pull_size=64, epsilon=0.0)
    selector.select(SelectorState(40))
    selector.record(SelectorState(40), OFF, (1,) * 40, 1.0)
    assert selector.select(SelectorState(32)) in selector.arms(32)
    selector.record(SelectorState(32), selector.select(SelectorState(32)), (1,) * 32, 1.0)
    assert selector.values(40) == {}


def test_steps_of_another_strategy_or_bucket_are_not_counted():
    selector = BEGMABSelector(groups=((3,), (1,)), thresholds=(1, 33))
    assert selector.select(SelectorState(40)) == OFF
    selector.record(SelectorState(40), Strategy(1), (1,) * 40, 1.0)
    selector.record(SelectorState(16), OFF, (1,) * 16, 1.0)
    assert selector.values(16) == selector.values(40) == {}


def test_a_silenced_drafter_is_left_at_once_and_the_others_are_learned_about():
    drafters = ("learned", "ngram")
    selector = BEGMABSelector(groups=((3,),), thresholds=(1,), drafters=drafters, epsilon=0.5, pull_size=12)
    while not selector.select(SelectorState(4)).is_learned:
        pull(selector, 4, {0: 1.0, 3: 2.0})
    silenced = SelectorState(4, is_silenced=True)
    chosen = []
    for _ in range(60):
        chosen.append(selector.select(silenced))
        selector.record(silenced, chosen[-1], (1,) * 4, 0.5)
    assert set(chosen) == {OFF, Strategy(3, "ngram")}
    assert all(len(set(chosen[start : start + 3])) == 1 for start in range(0, 60, 3))  # whole pulls
    assert selector.values(4).keys() == {OFF, Strategy(3, "ngram")}


def test_epsilon_is_the_share_of_random_pulls():
    selector = BEGMABSelector(groups=((3, 1),), thresholds=(1,), epsilon=0.3, seed=1)
    rates = {0: 1.0, 1: 3.0, 3: 2.0}
    pulled = [pull(selector, 16, rates).num_draft_tokens for _ in range(3000)]
    assert pulled.count(1) / len(pulled) == pytest.approx(1 - 0.3 * 2 / 3, abs=0.03)


def test_arm_that_lost_long_ago_is_tried_again(monkeypatch):
    monkeypatch.setattr(beg_mab, "MAX_AGE", 50)
    selector = BEGMABSelector(groups=((3,),), thresholds=(1,), epsilon=0.0)
    lost = [pull(selector, 16, {0: 2.0, 3: 1.0}).num_draft_tokens for _ in range(50)]
    assert lost.count(3) == 1
    won = [pull(selector, 16, {0: 2.0, 3: 4.0}).num_draft_tokens for _ in range(100)]
    assert set(won[10:40]) == {3}


def test_an_arm_is_worth_the_median_of_its_last_pulls():
    selector = BEGMABSelector(groups=((3,),), thresholds=(1,), window=3, epsilon=0.0)
    rates = iter((9.0, 9.0, 9.0, 5.0, 1.0, 2.0))
    while (rate := next(rates, None)) is not None:
        while not pull(selector, 16, {0: rate, 3: 0.01}).is_off:
            pass
    assert selector.values(16)[OFF] == pytest.approx(2.0)


def test_a_restored_selector_draws_by_its_own_seed():
    rates = {0: 1.0, 1: 3.0, 3: 2.0}
    saved, same, other = (BEGMABSelector(((3, 1),), (1,), epsilon=0.9, seed=seed) for seed in (0, 0, 1))
    for _ in range(20):
        pull(saved, 16, rates)
    for selector in (same, other):
        selector.load_state_dict(saved.state_dict())
    draws, again, others = ([pull(each, 16, rates) for _ in range(20)] for each in (saved, same, other))
    assert draws == again
    assert draws != others
