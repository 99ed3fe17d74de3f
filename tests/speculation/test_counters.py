"""What is counted of a rollout's engine steps."""

from dataclasses import fields

import pytest

from tlt_lightning.speculation.counters import SpeculationCounters, arm_name
from tlt_lightning.speculation.strategy import OFF, Strategy


def test_counts_begin_at_zero_and_acceptance_at_one() -> None:
    counters = SpeculationCounters()
    assert not any(getattr(counters, count.name) for count in fields(counters))
    assert counters.stats() == {
        "speculation/acceptance_length": 1.0,
        "speculation/off_share": 0.0,
        "speculation/k_mean": 0.0,
        "speculation/switches": 0.0,
    }


def test_counters_by_hand() -> None:
    counters = SpeculationCounters()
    counters.count_step(OFF, [0, 0], [1, 1])
    counters.count_step(Strategy(3), [3, 3, 0], [4, 2, 1])
    counters.count_step(Strategy(1, "ngram"), [1], [1])
    stats = counters.stats()
    assert stats["speculation/acceptance_length"] == pytest.approx((4 + 2 + 1) / 3)
    assert stats["speculation/off_share"] == pytest.approx(1 / 3)
    assert stats["speculation/k_mean"] == pytest.approx(4 / 3)
    assert [stats[f"speculation/acceptance_rate_pos_{k}"] for k in (1, 2, 3)] == pytest.approx([2 / 3, 1 / 2, 1 / 2])
    assert arm_name(Strategy(7, "sibling")) == "sibling_7"


def test_seconds_are_those_of_each_arm_and_of_the_head() -> None:
    """By the head's share, its training is given time that it can earn back."""
    counters = SpeculationCounters()
    for strategy, seconds in ((OFF, 1.0), (Strategy(3), 2.0), (Strategy(5, "mixed"), 2.0), (Strategy(3, "ngram"), 3.0)):
        counters.count_time(strategy, 12, seconds)
    stats = counters.stats()
    assert stats["speculation/learned_share"] == 0.5
    assert [stats[f"speculation/tokens_per_s_{arm}"] for arm in ("off", "learned_3", "ngram_3")] == [12.0, 6.0, 4.0]
