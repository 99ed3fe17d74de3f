"""What a rollout's steps are boiled down to."""

from types import SimpleNamespace

import pytest

from benchmarks.rollout.steps import (
    Row,
    StepRecorder,
    WatchedScheduler,
    acceptance_by_phase,
    by_batch,
    slowest,
    stall_seconds,
    summarize,
)
from tlt_lightning.engine import RolloutProgress
from tlt_lightning.speculation import Strategy
from tlt_lightning.speculation.counters import SpeculationCounters


def test_step_times_are_medians_of_each_batch_size_and_do_not_see_pauses() -> None:
    rows = [Row(0.010 * i, 5, 0, 10 * i) for i in range(9)]
    rows += [Row(1.0, 1, 0, 90), *(Row(1.0 + 0.004 * i, 1, 0, 90 + 2 * i) for i in range(1, 6))]
    assert by_batch(rows) == [[1.0, 5, 4.0, 2.0], [5.0, 9, 10.0, 2.0]]


def test_a_stall_is_what_medians_do_not_explain_and_its_step_is_kept() -> None:
    times = [0.5 + 0.01 * i + (7.0 if i > 6 else 0.0) for i in range(20)]
    rows = [Row(seconds, 4, 0, 4 + 4 * i) for i, seconds in enumerate(times)]
    found = summarize([*rows, Row(times[-1] + 0.01, 0, 0, 90)], 4, times[-1] + 0.01, 90)
    assert stall_seconds(found) == pytest.approx(7.0)
    assert slowest(rows)[0] == [pytest.approx(7.57), 4, pytest.approx(7010)]
    assert len(found["slowest"]) == 5
    assert stall_seconds(found | {"seconds": 0.6}) == 0.0


def test_a_rollout_is_summarized() -> None:
    prompts = [Row(0.5, 2, 2, 1), Row(1.0, 4, 0, 3)]  # the fourth request has written nothing yet
    rows = [*prompts, Row(2.0, 4, 0, 4), Row(3.0, 3, 1, 10), Row(10.0, 0, 0, 100)]
    found = summarize(rows, num_requests=4, seconds=10.0, tokens=100)
    assert found["prefill_seconds"] == 2.0
    assert found["tokens_per_s"] == 10.0
    assert (found["most_running"], found["preempted"], found["steps"]) == (4, 1, 5)
    assert found["curve"][0] == [0.5, 2]


def test_chances_are_given_the_drafts_before_and_of_each_phase_alone() -> None:
    counters = SpeculationCounters()
    recorder = StepRecorder(longest=16, counters=lambda: counters)
    for longest, emitted in ((2, (3, 3, 1, 2)), (4, (1, 1, 1, 3))):
        counters.count_step(Strategy(2), (2, 2, 2, 2), emitted)
        recorder(RolloutProgress(waiting=0, running=4, finished=0, tokens=9, longest=longest, elapsed=1.0))
    assert acceptance_by_phase(recorder.phases) == [[0.75, pytest.approx(2 / 3, abs=1e-4)], [0.25, 1.0]]


def test_a_phase_is_not_closed_before_the_rollout_has_come_so_far() -> None:
    recorder = StepRecorder(longest=800, counters=SpeculationCounters)
    for longest in (10, 99, 100, 101):
        recorder(RolloutProgress(waiting=0, running=4, finished=0, tokens=9, longest=longest, elapsed=1.0))
    assert len(recorder.phases) == 1


def test_a_scheduler_is_watched_and_left_alone() -> None:
    taken = []
    scheduler = SimpleNamespace(update_from_output=lambda output, result: taken.append((output, result)) or "outputs")
    watched = WatchedScheduler(scheduler)
    output = SimpleNamespace(
        num_scheduled_tokens={"a": 4, "b": 4, "prompt": 7, "plain": 1},
        scheduled_spec_decode_tokens={"a": [-1] * 3, "b": [-1] * 3},
    )
    result = SimpleNamespace(
        req_id_to_index={"a": 0, "b": 1, "prompt": 2, "plain": 3}, sampled_token_ids=[[5, 6, 7], [5], [9], [4]]
    )
    assert scheduler.update_from_output(output, result) == "outputs"
    assert taken == [(output, result)]
    assert watched.counters.acceptance_length == 2.0  # of the two that verified drafts
    assert watched.counters.sum_k == 3
    output.num_scheduled_tokens, output.scheduled_spec_decode_tokens = {"prompt": 7}, {}
    scheduler.update_from_output(output, result)
    assert watched.counters.decode_steps == 1  # reading a prompt is none
