"""The loop between selector and engine, without an engine."""

import json
import logging
import re

import pytest

from tests.support.speculation_engines import ScriptedSelector
from tlt_lightning.speculation import BEGMABSelector, CostModelSelector, FixedSelector
from tlt_lightning.speculation.alarm import AcceptanceAlarm
from tlt_lightning.speculation.controller import StepPlan, StepResult, StrategyController
from tlt_lightning.speculation.lookup import LEARNED, PRIOR_COUNT, LookupDrafter, Source
from tlt_lightning.speculation.strategy import OFF, MeasuredStep, SelectorState, Strategy, StrategySelector


def result(plan: StepPlan, drafted: list[int], emitted: list[int], **changes: object) -> StepResult:
    fields = {
        "plan": plan,
        "num_drafted": drafted,
        "num_emitted": emitted,
        "sources": [LEARNED if d else None for d in drafted],
        "is_decode": True,
    }
    return StepResult(**{**fields, **changes})  # type: ignore[arg-type]


def test_a_step_verifies_what_the_step_before_drafted() -> None:
    selector = ScriptedSelector()
    choices = iter([Strategy(3), OFF, Strategy(2), Strategy(2)])
    selector.script = lambda state: next(choices)
    control = StrategyController(selector, steps_per_choice=1)
    plans = [control.plan(4, 100.0, 0) for _ in range(4)]
    assert [plan.drafts for plan in plans] == [Strategy(3), OFF, Strategy(2), Strategy(2)]
    assert [plan.verifies for plan in plans] == [OFF, Strategy(3), OFF, Strategy(2)]
    assert [plan.verifies == plan.drafts for plan in plans] == [False, False, False, True]
    assert control.counters.switches == 3
    assert plans[0].state == SelectorState(batch_size=4, mean_context=100.0, drafter_version=-1, waiting=0)


def test_off_is_off_whoever_would_draft() -> None:
    selector = ScriptedSelector(longest=5)
    selector.script = lambda state: Strategy(0, "ngram")
    assert StrategyController(selector).plan(4, 100.0, 0).drafts == OFF


def test_a_choice_stands_for_its_steps() -> None:
    selector = ScriptedSelector()
    choices = iter([Strategy(3), Strategy(1)])
    selector.script = lambda state: next(choices)
    control = StrategyController(selector, steps_per_choice=3)
    assert [control.plan(1, 0.0, 0).drafts.num_draft_tokens for _ in range(6)] == [3, 3, 3, 1, 1, 1]


def test_only_settled_decode_steps_teach_the_selector() -> None:
    selector = ScriptedSelector()
    selector.script = lambda state: Strategy(2)
    control = StrategyController(selector, steps_per_choice=1)
    for is_decode in (True, True, False, True):
        control.finished(result(control.plan(2, 0.0, 0), [2, 2], [3, 1], is_decode=is_decode))
        control.account(0.25)
    assert [(strategy, emitted, seconds) for _, strategy, emitted, seconds in selector.records] == [
        (Strategy(2), (3, 1), 0.25)
    ] * 2
    stats = control.stats()
    assert stats["speculation/tokens_per_s_learned_2"] == 4 / 0.25
    assert stats["speculation/acceptance_length"] == 2


def test_calls_that_finish_no_step_add_to_the_next() -> None:
    selector = ScriptedSelector()
    control = StrategyController(selector, steps_per_choice=1)
    control.plan(1, 0.0, 0)
    assert control.look_up(["a"], 3) == {}
    control.account(0.5)
    control.finished(result(control.plan(1, 0.0, 0), [0], [1]))
    control.account(0.25)
    assert selector.records[0][3] == 0.75


def test_a_rollout_begins_without_the_seconds_choice_and_counts_of_the_last() -> None:
    selector = ScriptedSelector()
    control = StrategyController(selector, steps_per_choice=2)
    for _ in range(2):
        control.begin_rollout()
        control.finished(result(control.plan(1, 0.0, 0), [0], [1]))
        control.account(0.25)
        control.plan(1, 0.0, 0)
        control.plan(1, 0.0, 0)  # the first of a choice that the rollout's end cuts short
        control.account(0.5, 0.5)
        control.end_rollout()
    assert [seconds for *_, seconds in selector.records] == [0.25, 0.25]
    assert control.counters.decode_steps == 1
    selector.script = lambda state: Strategy(2)
    control.begin_rollout()
    assert control.plan(1, 0.0, 0).drafts == Strategy(2)  # a choice of its own


def test_steps_that_look_up_draft_from_what_others_write_until_the_rollout_ends() -> None:
    selector, prompt, text = ScriptedSelector(("learned", "sibling")), list(range(1, 11)), [20, 21, 22]
    lookups = LookupDrafter(siblings=True, ngram=False)
    control = StrategyController(selector, steps_per_choice=1, lookups=lookups)
    texts = {"a": prompt + text, "b": [*prompt]}
    for name, tokens in texts.items():
        lookups.add(name, tokens, len(prompt))

    def look_up(strategy: Strategy) -> dict[str, list[int]]:
        selector.script = lambda state: strategy
        control.plan(2, 0.0, 0)
        return {name: draft.tokens for name, draft in control.look_up([*texts, "gone"], 3).items()}

    assert look_up(Strategy(3)) == {}
    assert look_up(Strategy(3, "sibling")) == {"b": [20, 21, 22]}
    texts["a"].append(23)
    texts["b"].append(20)
    assert look_up(Strategy(3, "sibling")) == {"b": [21, 22, 23]}  # each step reads on
    control.finished(result(control.plan(1, 0.0, 0), [3, 3], [4, 1], sources=[("sibling", 8), None]))
    assert lookups.scores.expected(("sibling", 8), 5) == 4 + (3 - 4) / (PRIOR_COUNT + 1)
    lookups.remove("b")
    assert look_up(Strategy(3, "sibling")) == {}
    control.end_rollout()
    lookups.add("b", texts["b"], len(prompt))
    assert look_up(Strategy(3, "sibling")) == {}


def test_a_cold_head_is_silenced_until_weights_of_its_own_have_come() -> None:
    selector = ScriptedSelector()
    selector.script = lambda state: Strategy(2)
    control = StrategyController(selector, steps_per_choice=1, is_cold=True)
    assert (control.plan(1, 0.0, 0).drafts, control.plan(1, 0.0, 0).state.is_silenced) == (OFF, True)
    control.weights_changed()  # the policy's
    assert (control.plan(1, 0.0, 0).drafts, control.drafter_version) == (OFF, -1)
    control.weights_changed(0)
    assert (control.plan(1, 0.0, 0).drafts, control.drafter_version) == (Strategy(2), 0)


@pytest.mark.parametrize(
    ("sources", "emitted", "is_silenced"),
    [([LEARNED] * 2, [1, 1], True), ([LEARNED] * 2, [2, 1], False), ([("sibling", 4)] * 2, [1, 1], False)],
)
def test_the_head_is_silenced_by_its_own_drafts_of_which_none_is_accepted(
    sources: list[Source], emitted: list[int], is_silenced: bool
) -> None:
    control = StrategyController(ScriptedSelector(), alarm=AcceptanceAlarm(window=8))
    for _ in range(4):
        control.finished(result(control.plan(2, 0.0, 0), [2, 2], emitted, sources=sources))
        control.account(1.0)
    assert control.is_silenced is is_silenced


def test_a_step_in_which_nothing_was_decoded_teaches_nothing() -> None:
    selector = ScriptedSelector()
    control = StrategyController(selector, steps_per_choice=1)
    control.finished(result(control.plan(1, 0.0, 0), [], []))
    control.account(0.25)
    assert selector.records == []
    assert control.counters.decode_steps == 0


def test_a_plan_is_of_the_requests_that_really_run() -> None:
    plan = StrategyController(ScriptedSelector()).plan(4, 100.0, 1)
    assert plan.with_batch(4) == plan
    fewer = plan.with_batch(3)
    assert fewer.state == SelectorState(batch_size=3, mean_context=100.0, drafter_version=-1, waiting=1, num_steps=2)
    assert (fewer.verifies, fewer.drafts) == (plan.verifies, plan.drafts)


def test_pauses_are_the_steps_own_unless_they_may_have_outlasted_it() -> None:
    selector = ScriptedSelector()
    control = StrategyController(selector, steps_per_choice=1)
    for seconds, pause in ((0.25, 0.125), (0.125, 0.25), (0.1875, 0.125)):
        control.finished(result(control.plan(1, 0.0, 0), [0], [1]))
        control.account(seconds, pause)
    assert [seconds for *_, seconds in selector.records] == [0.375, 0.3125]
    assert control.counters.decode_steps == 3


def test_what_was_learned_of_steps_in_16_bit_is_not_restored_in_8_bit() -> None:
    selectors = [CostModelSelector() for _ in range(3)]
    old, same, other = (
        StrategyController(selector, compute_dtype=kind)
        for selector, kind in zip(selectors, ("bfloat16", "bfloat16", "fp8"), strict=True)
    )
    old.weights_changed(5)
    selectors[0].calibrate([MeasuredStep(1, OFF, 350.0, 0.125)])
    for control in (same, other):
        control.load_state_dict(json.loads(json.dumps(old.state_dict())))
    assert [selector.wants_calibration for selector in selectors] == [False, False, True]
    assert other.drafter_version == same.drafter_version == 5


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (FixedSelector(), CostModelSelector()),
        (BEGMABSelector(), CostModelSelector()),
        (CostModelSelector((1, 7)), CostModelSelector((1, 5))),
        (CostModelSelector(drafters=("learned", "ngram")), CostModelSelector(drafters=("ngram", "learned"))),
        (BEGMABSelector(), BEGMABSelector(groups=((7, 3, 1), (3, 1)))),  # as many arms
        (BEGMABSelector(), BEGMABSelector(groups=((5, 3, 1), (5, 1)))),
    ],
)
def test_a_selector_of_another_class_or_other_arms_starts_anew_and_says_so(
    old: StrategySelector, new: StrategySelector, caplog: pytest.LogCaptureFixture
) -> None:
    before, (saving, loading) = new.state_dict(), map(StrategyController, (old, new))
    saving.weights_changed(5)
    loading.load_state_dict(json.loads(json.dumps(saving.state_dict())))
    names = type(old).__name__, type(new).__name__
    assert re.search(
        rf"holds what {names[0]} \(off, .*in bfloat16 learned: {names[1]} \(off, .* starts anew", caplog.text
    )
    assert loading.drafter_version == 5
    assert new.state_dict() == before


def test_state_is_restored() -> None:
    def made() -> StrategyController:
        lookups = LookupDrafter(siblings=True, ngram=False)
        return StrategyController(BEGMABSelector(), lookups=lookups, alarm=AcceptanceAlarm(window=4))

    control, again = made(), made()
    control.weights_changed(5)
    for _ in range(3):
        control.finished(result(control.plan(2, 0.0, 0), [2, 2], [1, 1]))
        control.account(1.0)
    assert control.is_silenced
    again.load_state_dict(json.loads(json.dumps(control.state_dict())))
    assert again.state_dict() == control.state_dict()
    assert (again.drafter_version, again.alarm.num_rung) == (5, 1)
    assert not again.is_silenced  # the next weights come before the next rollout
    assert again.lookups is not None
    assert again.lookups.scores.expected(LEARNED, 2) < 1
    without = StrategyController(BEGMABSelector())
    again.load_state_dict(without.state_dict())
    without.load_state_dict(control.state_dict())
    assert (again.drafter_version, without.drafter_version) == (-1, 5)


def test_the_selector_hears_of_a_head_once_and_keeps_what_it_has_seen_of_it_over_a_resume() -> None:
    control, again = (StrategyController(CostModelSelector()) for _ in range(2))
    control.weights_changed(5, accepted=[0.9, 0.8, 0.7])
    assert control.selector.acceptance["learned"].probability(1) == pytest.approx(0.9)
    control.selector.acceptance["learned"].update(3, (1,) * 100)
    again.load_state_dict(control.state_dict())
    again.weights_changed(5, accepted=[0.9, 0.8, 0.7])  # the engine of a resumed run begins with another head
    assert again.state_dict() == control.state_dict()


@pytest.mark.parametrize("kind", [CostModelSelector, BEGMABSelector])
def test_selectors_leave_a_silenced_head_alone_and_learn_nothing_of_it(
    kind: type[CostModelSelector | BEGMABSelector], monkeypatch: pytest.MonkeyPatch
) -> None:
    selector = kind()
    chosen: list[Strategy] = []

    def select(state: SelectorState) -> Strategy:
        chosen.append(kind.select(selector, state))
        return chosen[-1]

    monkeypatch.setattr(selector, "select", select)
    control = StrategyController(selector, steps_per_choice=1)

    def drafts(num_steps: int, emitted: int) -> list[Strategy]:
        found = []
        for _ in range(num_steps):
            plan = control.plan(4, 100.0, 0)
            k = plan.verifies.num_draft_tokens
            control.finished(result(plan, [k] * 4, [min(emitted, k) + 1] * 4))
            control.account(0.005 + 0.0025 * (k > 0))
            found.append(plan.drafts)
        return found

    assert not all(arm.is_off for arm in drafts(300, 4))
    # Until a pull of a head's arm is under way.
    assert any(
        not drafts(1, 4)[0].is_off
        and (isinstance(selector, CostModelSelector) or selector._stepped < selector.pull_size)
        for _ in range(1000)
    )
    learned = json.dumps(selector.state_dict())
    control.alarm.is_ringing = True
    chosen.clear()
    drafts(1, 0)  # what the last step drafted
    assert all(arm.is_off for arm in drafts(500, 0))
    assert not any(arm.is_learned for arm in chosen)
    if isinstance(selector, CostModelSelector):
        assert selector.step_time.seconds(4, Strategy(3), 100.0) == pytest.approx(0.0075, rel=0.05)
        assert selector.step_time.seconds(4, OFF, 100.0) == pytest.approx(0.005, rel=0.05)
    else:
        rewards = [json.loads(state)["rewards"][0][1:] for state in (learned, json.dumps(selector.state_dict()))]
        assert all(set(map(tuple, after)) <= set(map(tuple, before)) for before, after in zip(*rewards, strict=True))


def test_the_alarm_rings_once_and_only_below_the_floor(caplog: pytest.LogCaptureFixture) -> None:
    alarm = AcceptanceAlarm(window=100)
    for _ in range(40):
        alarm.observe(10, 1)
    assert not alarm.is_ringing
    with caplog.at_level(logging.WARNING):
        for step in range(40):
            alarm.observe(10, 0)
            assert alarm.is_ringing == (step >= 9)  # the window forgets what was accepted before
    assert (alarm.num_rung, len(caplog.records)) == (1, 1)
    alarm.reset()
    alarm.observe(99, 0)
    assert not alarm.is_ringing


def test_a_silenced_choice_is_off_and_credited_with_what_off_achieves() -> None:
    selector = ScriptedSelector(("learned", "sibling"))
    selector.script = lambda state: Strategy(2)
    control = StrategyController(selector, steps_per_choice=1, alarm=AcceptanceAlarm(window=2))
    control.finished(result(control.plan(2, 0.0, 0), [0, 0], [1, 1]))
    control.account(1.0)
    control.finished(result(control.plan(2, 0.0, 0), [2, 2], [1, 1]))
    control.account(1.0)
    plans = [control.plan(2, 0.0, 0) for _ in range(2)]
    assert [plan.drafts for plan in plans] == [OFF, OFF]
    assert plans[1].verifies == OFF
    selector.script = lambda state: Strategy(2, "sibling")
    assert control.plan(2, 0.0, 0).drafts == Strategy(2, "sibling")
    selector.script = lambda state: Strategy(2)
    control.weights_changed(5)
    assert control.plan(2, 0.0, 0).drafts == Strategy(2)
    assert control.plan(2, 0.0, 0).state.drafter_version == 5
