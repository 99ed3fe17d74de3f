"""A head that waits for its first weights: nobody tries it, and nothing is learned about it."""

from tests.speculation.test_controller import result
from tests.support.speculation_engines import ScriptedSelector
from tlt_lightning.speculation import CostModelSelector
from tlt_lightning.speculation.controller import StrategyController
from tlt_lightning.speculation.strategy import OFF, SelectorState, Strategy


def test_a_cold_head_drafts_nothing_whatever_the_selector_says() -> None:
    selector = ScriptedSelector(("learned", "sibling"))
    control = StrategyController(selector, steps_per_choice=1, is_cold=True)
    selector.script = lambda state: Strategy(2)
    assert [control.plan(2, 0.0, 0).drafts for _ in range(2)] == [OFF, OFF]
    selector.script = lambda state: Strategy(2, "sibling")
    assert control.plan(2, 0.0, 0).drafts == Strategy(2, "sibling")
    control.weights_changed()  # the policy's
    assert control.plan(2, 0.0, 0).state.is_silenced
    control.weights_changed(1)
    selector.script = lambda state: Strategy(2)
    plan = control.plan(2, 0.0, 0)
    assert (plan.drafts, plan.state.is_silenced, plan.state.drafter_version) == (Strategy(2), False, 1)


def test_the_cost_model_looks_at_a_head_only_once_it_has_weights_and_takes_it_if_it_pays() -> None:
    selector = CostModelSelector(num_draft_tokens=(3,), drafters=("learned", "sibling"))
    control = StrategyController(selector, steps_per_choice=1, is_cold=True)
    emitted = {"learned": 3, "sibling": 2}

    def drafters(steps: int) -> list[str]:
        names = []
        for _ in range(steps):
            plan = control.plan(8, 500.0, 0)
            k = plan.verifies.num_draft_tokens
            control.finished(result(plan, [k] * 8, [emitted[plan.verifies.drafter] if k else 1] * 8))
            control.account(0.01 + 0.002 * (k > 0))
            names.append("off" if plan.drafts.is_off else plan.drafts.drafter)
        return names

    before = drafters(400)
    assert "learned" not in before
    assert before[-1] == "sibling"
    assert selector.acceptance["learned"].probability(1) == 0.6  # the prior: nothing was learned about it
    control.weights_changed(1)
    after = drafters(100)
    assert after[-1] == "learned"
    assert after.count("learned") > 50


def test_selectors_that_do_not_know_of_cold_heads_see_plain_decoding() -> None:
    assert SelectorState(4) == SelectorState(4, is_silenced=False)
    selector = ScriptedSelector()
    selector.script = lambda state: Strategy(2)
    control = StrategyController(selector, steps_per_choice=1, is_cold=True)
    for _ in range(3):
        control.finished(result(control.plan(2, 0.0, 0), [0, 0], [1, 1]))
        control.account(0.5)
    assert [(strategy, emitted) for _, strategy, emitted, _ in selector.records] == [(OFF, (1, 1))] * 3
    assert control.stats()["speculation/alarms"] == 0
