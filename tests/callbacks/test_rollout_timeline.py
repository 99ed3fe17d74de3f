import pytest

from tests.support.rollout_loop import progress
from tlt_lightning.callbacks.rollout_timeline import RolloutTimeline, rank_timeline
from tlt_lightning.speculation.strategy import OFF, Strategy


def test_nothing_is_shown_of_no_rollout() -> None:
    assert RolloutTimeline().spans() is None


def test_a_span_has_means_over_time_and_knows_who_drafted() -> None:
    timeline = RolloutTimeline()
    timeline.add(progress(waiting=2, running=4, finished=0, tokens=4, elapsed=1.0, strategy=OFF))
    timeline.add(progress(waiting=0, running=4, finished=2, tokens=16, elapsed=2.0, strategy=Strategy(3, "ngram")))
    timeline.add(progress(waiting=0, running=0, finished=6, tokens=24, elapsed=4.0, strategy=Strategy(5)))
    assert timeline.spans(2) == {
        "seconds": 4.0,
        "waiting": [1.0, 0.0],
        "k": [1.5, 5.0],
        "tokens": [1.6, 2.0],  # 16 tokens of 4 + 6 requests, then 8 of 4
        "running": {"learned": [0.0, 4.0], "ngram": [3.0, 0.0], "off": [2.0, 0.0]},
    }
    timeline.clear()
    assert timeline.spans() is None


def test_spans_keep_the_sums_of_the_steps_and_their_number_is_bounded() -> None:
    timeline, area = RolloutTimeline(), 0.0
    for step in range(1000):
        drafter = Strategy(step % 4, "ngram")
        seconds = 0.01 * (1 + step % 3)
        area += 8 * seconds
        elapsed = area / 8
        timeline.add(progress(waiting=0, running=8, finished=0, tokens=8 * step, elapsed=elapsed, strategy=drafter))
    spans = timeline.spans(50)
    assert spans is not None
    assert {len(values) for values in (spans["k"], *spans["running"].values())} == {50}
    width = spans["seconds"] / 50
    assert sum(map(sum, spans["running"].values())) * width == pytest.approx(area, rel=1e-2)
    assert sum(spans["k"]) / 50 == pytest.approx(1.5, rel=0.1)


def test_rounds_of_dynamic_sampling_follow_one_another() -> None:
    timeline = RolloutTimeline()
    for _ in range(2):
        timeline.add(progress(waiting=0, running=2, finished=0, tokens=2, elapsed=1.0))
        timeline.add(progress(waiting=0, running=0, finished=2, tokens=4, elapsed=2.0))
    spans = timeline.spans(4)
    assert spans is not None
    assert (spans["seconds"], spans["running"]["off"], spans["tokens"]) == (4.0, [2.0] * 4, [1.0] * 4)


def test_a_workers_stages_stay_in_order_and_the_training_in_its_idle_windows_is_seen() -> None:
    laps = [("rollout", 2.0), ("idle", 1.0), ("rollout", 0.5), ("idle", 2.0), ("update", 3.0)]
    assert rank_timeline(laps, 0.0) == laps
    used = [("rollout", 2.0), ("idle, used", 1.0), ("rollout", 0.5), ("idle, used", 0.5), ("idle", 1.5)]
    assert rank_timeline(laps, 1.5) == [*used, ("update", 3.0)]


def test_of_many_stages_the_shortest_join_those_before_them() -> None:
    laps = [("rollout", 5.0), *200 * [("update", 1.0), ("other", 0.01)], ("checkpoint", 4.0)]
    shown = rank_timeline(laps, 0.0, most=202)
    assert shown == [("rollout", 5.0), ("update", pytest.approx(202.0)), ("checkpoint", 4.0)]
