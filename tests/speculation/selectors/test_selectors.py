"""What every selector promises, and the two that do not learn."""

import json
import random
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from jsonargparse import ArgumentParser

from tlt_lightning.speculation import (
    OFF,
    BEGMABSelector,
    CostModelSelector,
    FixedSelector,
    SelectorState,
    Strategy,
    StrategySelector,
    ThresholdSelector,
)
from tlt_lightning.speculation.counters import arm_name

SELECTORS = [
    FixedSelector,
    ThresholdSelector,
    BEGMABSelector,
    lambda: BEGMABSelector(drafters=("learned", "sibling"), epsilon=0.5),
    CostModelSelector,
    lambda: CostModelSelector(drafters=("learned", "ngram")),
]


def drive(
    selector: StrategySelector, seed: int, num_steps: int, after_step: Callable[[], None] = lambda: None
) -> list[Strategy]:
    """Run `selector` on steps whose sizes, luck and times are drawn from `seed`; return its choices."""
    generator = random.Random(seed)
    choices, batch = [], 60
    for step in range(num_steps):
        batch = max(1, min(60, batch + generator.choice((-3, -1, 0, 1))))
        state = SelectorState(batch, 100.0 + step, drafter_version=step // 150)
        strategy = selector.select(state)
        choices.append(strategy)
        emitted = tuple(generator.randint(1, strategy.num_draft_tokens + 1) for _ in range(batch))
        seconds = (0.005 + 0.001 * strategy.num_draft_tokens) * generator.uniform(0.9, 1.1)
        selector.record(state, strategy, emitted, seconds)
        after_step()
    return choices


@pytest.mark.parametrize("make", SELECTORS)
@pytest.mark.parametrize("seed", [0, 1])
def test_restored_selector_makes_the_choices_of_the_one_that_was_saved(make, seed):
    selector, restored = make(), make()
    drive(selector, seed, 157)  # stops in the middle of pulls and probes
    restored.load_state_dict(json.loads(json.dumps(selector.state_dict())))
    assert drive(restored, seed + 10, 200) == drive(selector, seed + 10, 200)
    assert restored.state_dict() == selector.state_dict()


@pytest.mark.parametrize("make", SELECTORS)
def test_state_survives_json_at_every_step(make):
    selector = make()

    def check() -> None:
        saved, restored = selector.state_dict(), make()
        restored.load_state_dict(json.loads(json.dumps(saved)))
        assert restored.state_dict() == saved

    drive(selector, 5, 400, check)


@pytest.mark.parametrize("make", SELECTORS)
def test_same_steps_give_the_same_choices(make):
    assert drive(make(), 3, 300) == drive(make(), 3, 300)


@pytest.mark.parametrize(
    ("make", "counts", "switches"),
    [
        (BEGMABSelector, {"off": 6, "learned_1": 2, "learned_3": 32, "learned_5": 760}, 23),
        (CostModelSelector, {"off": 1, "learned_1": 632, "learned_3": 167}, 71),
        (
            lambda: CostModelSelector(drafters=("learned", "ngram")),  # off and on again, so that catching up counts
            {"off": 1, "learned_3": 4, "ngram_1": 488, "ngram_3": 299, "ngram_5": 8},
            49,
        ),
    ],
)
def test_a_change_that_is_not_meant_to_leaves_choices_as_they_were(
    make: Callable[[], StrategySelector], counts: dict[str, int], switches: int
) -> None:
    """On made-up steps: the numbers say nothing of quality, `test_on_simulator.py` does."""
    choices = drive(make(), 7, 800)
    assert Counter(map(arm_name, choices)) == counts
    assert sum(a != b for a, b in pairwise(choices)) == switches


@pytest.mark.parametrize("make", SELECTORS)
def test_off_is_an_arm_at_every_batch_size(make):
    selector = make()
    for batch in range(1, 600):
        arms = selector.arms(batch)
        assert OFF in arms
        assert len(set(arms)) == len(arms)


@pytest.mark.parametrize("make", SELECTORS)
def test_choices_are_arms_of_their_batch_size(make):
    selector = make()
    generator = random.Random(0)
    for _ in range(400):
        state = SelectorState(generator.choice((1, 2, 8, 33, 47, 64, 129, 300)), 500.0)
        strategy = selector.select(state)
        assert strategy in selector.arms(state.batch_size)
        emitted = (1,) * state.batch_size
        selector.record(state, strategy, emitted, generator.uniform(0.004, 0.02))


@pytest.mark.parametrize(
    ("drafter", "is_learned", "looks_up"),
    [("learned", True, False), ("mixed", True, True), ("ngram", False, True), ("sibling", False, True)],
)
def test_who_drafts_in_a_step_and_nobody_while_off(drafter, is_learned, looks_up):
    on, off = Strategy(3, drafter), Strategy(0, drafter)
    assert (on.is_learned, on.looks_up) == (is_learned, looks_up)
    assert not off.is_learned
    assert not off.looks_up


def test_fixed_selector_never_changes_its_mind():
    assert set(drive(FixedSelector(3, "ngram"), 0, 100)) == {Strategy(3, "ngram")}
    assert FixedSelector(0).arms(7) == (OFF,)


def test_threshold_hysteresis_keeps_a_hovering_batch_from_thrashing():
    selector = ThresholdSelector(3, max_running=32, band=8)
    sizes = [40, 33, 32, 33, 32, 40, 33, 41, 40, 33, 32]
    chosen = [selector.select(SelectorState(size)).num_draft_tokens for size in sizes]
    assert chosen == [0, 0, 3, 3, 3, 3, 3, 0, 0, 0, 3]


def test_threshold_has_an_arm_up_to_the_end_of_its_band() -> None:
    selector, on = ThresholdSelector(3, "ngram", max_running=1, band=8), Strategy(3, "ngram")
    assert [selector.arms(size) for size in (1, 9, 10)] == [(OFF, on), (OFF, on), (OFF,)]
    assert selector.select(SelectorState(1)) == on


def test_threshold_without_a_band_is_the_rule_of_the_paper():
    selector = ThresholdSelector(3, max_running=32, band=0)
    chosen = [selector.select(SelectorState(size)).num_draft_tokens for size in (33, 32, 33, 1)]
    assert chosen == [0, 3, 0, 3]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: BEGMABSelector(groups=((3,),), thresholds=(1, 9)),
            "which ascend from 1, and the longest does not grow",
        ),
        (
            lambda: BEGMABSelector(groups=((3,), (1,)), thresholds=(2, 9)),
            "which ascend from 1, and the longest does not grow",
        ),
        (
            lambda: BEGMABSelector(groups=((3,), (5, 1)), thresholds=(1, 9)),
            "which ascend from 1, and the longest does not grow",
        ),
        (lambda: BEGMABSelector(groups=(), thresholds=()), "which ascend from 1, and the longest does not grow"),
        (
            lambda: BEGMABSelector(groups=((3,), ()), thresholds=(1, 9)),
            "which ascend from 1, and the longest does not grow",
        ),
        (lambda: CostModelSelector(num_draft_tokens=()), "`num_draft_tokens` lists draft lengths"),
        (lambda: CostModelSelector(drafters=()), "`drafters` who drafts"),
        (lambda: CostModelSelector(num_draft_tokens=(0, 1)), "off is always an arm"),
    ],
)
def test_bad_arguments_are_refused_by_name(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_an_arm_that_is_named_twice_is_one_arm() -> None:
    twice = CostModelSelector(num_draft_tokens=(3, 1, 3), drafters=("learned", "learned"))
    assert twice.arms(1) == CostModelSelector(num_draft_tokens=(1, 3)).arms(1)


def test_selectors_are_made_from_yaml():
    parser = ArgumentParser()
    parser.add_argument("--selector", type=StrategySelector)
    for name, arguments in (
        ("FixedSelector", "{num_draft_tokens: 3, drafter: ngram}"),
        ("ThresholdSelector", "{max_running: 16}"),
        ("BEGMABSelector", "{groups: [[3, 1], [1]], thresholds: [1, 9], drafters: [learned, sibling]}"),
        ("CostModelSelector", "{num_draft_tokens: [1, 3], drafters: [sibling]}"),
    ):
        config = parser.parse_string(f"selector: {{class_path: {name}, init_args: {arguments}}}")
        assert type(parser.instantiate_classes(config).selector).__name__ == name
    with pytest.raises(SystemExit):
        parser.parse_string("selector: {class_path: FixedSelector, init_args: {drafter: bogus}}")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-1,), "`num_draft_tokens` must be at least 0, got -1"),
        ((2.5,), r"`num_draft_tokens` must be a whole number, got 2\.5"),
        ((3, "magic"), "`drafter` must be one of 'learned', 'mixed', 'ngram', 'sibling', got 'magic'"),
    ],
)
def test_a_strategy_that_nobody_can_follow_is_refused(arguments: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        Strategy(*arguments)


@pytest.mark.parametrize("length", ["3", True, 2.5, None])
def test_a_draft_length_is_a_whole_number(length: Any) -> None:
    with pytest.raises(TypeError, match=r"`num_draft_tokens` must be a list of whole numbers, got [\[(]"):
        CostModelSelector(num_draft_tokens=(length,))
    with pytest.raises(TypeError, match=r"`num_draft_tokens` must be a list of whole numbers, got [\[(]"):
        BEGMABSelector(groups=((length,),), thresholds=(1,))
