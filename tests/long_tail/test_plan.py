"""What a plan reads of an iteration's metrics."""

import json

from tlt_lightning.long_tail.budget import MeasuredIteration
from tlt_lightning.long_tail.plan import DrafterPlan

METRICS = {
    "time/iteration": 20.0,
    "time/rollout": 8.0,
    "time/idle": 3.0,
    "time/drafter": 2.0,
    "drafter/seconds_not_hidden": 1.5,
    "drafter/tokens": 300.0,
    "speculation/learned_share": 0.75,
}


def test_an_iteration_is_read_from_its_metrics() -> None:
    plan = DrafterPlan(iteration=4, share=0.5, num_tokens=400, num_trained=100)
    measured = MeasuredIteration(
        seconds=20.0,
        decode_seconds=11.0,
        cost=2.0,
        training_seconds=1.5,
        share=0.5,
        idle_share=0.25,
        learned_share=0.75,
    )
    assert plan.measured(METRICS, is_cold=False) == measured
    assert plan.measured(METRICS, is_cold=True).learned_share is None


def test_what_an_iteration_has_not_is_nothing() -> None:
    nothing = MeasuredIteration(seconds=20.0, decode_seconds=0.0, cost=0.0, training_seconds=0.0, share=0.0)
    assert DrafterPlan().measured({"time/iteration": 20.0}, is_cold=False) == nothing
    assert (nothing.idle_share, nothing.learned_share) == (0.0, None)


def test_a_plan_is_restored_with_metrics_of_its_own() -> None:
    plan = DrafterPlan(4, None, {"drafter/published": 1.0}, num_tokens=400, num_trained=100)
    restored = DrafterPlan.restore(json.loads(json.dumps(plan.state_dict())))
    assert restored == plan
    again = DrafterPlan.restore(plan.state_dict())
    again.metrics["mine"] = 1.0
    assert plan.metrics == {"drafter/published": 1.0}
    new = DrafterPlan()
    assert (new.iteration, new.share, new.num_tokens, new.num_trained, new.started) == (-1, None, 0, 0, None)


def test_a_restored_plan_has_not_begun() -> None:
    plan = DrafterPlan(iteration=4, started=3.0)
    assert (plan.is_of(4), plan.is_of(5)) == (True, False)
    assert not DrafterPlan.restore(plan.state_dict()).is_of(4)
