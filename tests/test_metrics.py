from itertools import combinations
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tlt_lightning import metrics as metrics_module
from tlt_lightning.data.batch import Prompt, Rollout
from tlt_lightning.engine import Response
from tlt_lightning.metrics import (
    IterationLog,
    PassAtK,
    PeakMemory,
    combine,
    end_step,
    log_rollouts,
    pass_at_k,
    tail_share,
)


def rollout(group: int, reward: float, length: int = 3, reason: str = "stop") -> Rollout:
    response = Response(0, [2] * length, [-1.0] * length, reason, (0,))
    return Rollout(Prompt("q", [2]), response, "text", group, {"score": reward}, reward)


@pytest.mark.parametrize(("num_samples", "num_correct", "k"), [(4, 1, 2), (5, 3, 2), (6, 0, 3), (4, 4, 4)])
def test_pass_at_k_is_the_share_of_subsets_with_a_correct_sample(num_samples: int, num_correct: int, k: int) -> None:
    samples = [i < num_correct for i in range(num_samples)]
    subsets = list(combinations(samples, k))
    assert pass_at_k(num_samples, num_correct, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_metric_averages_over_prompts_and_batches() -> None:
    metric = PassAtK()
    metric.update([(0, True), (0, False), (0, False), (0, False)])
    metric.update([(1, True), (1, True), (1, True), (1, True)])
    values = {name: float(value) for name, value in metric.compute().items()}
    assert values == pytest.approx({"accuracy": 0.625, "pass@2": 0.75, "pass@4": 1.0})


def test_rollout_metrics_count_what_they_say() -> None:
    rollouts = [rollout(0, 1.0, 10), rollout(0, 1.0, 20), rollout(1, 0.0, 30, "length"), rollout(1, 1.0, 40)]
    log = IterationLog()
    log_rollouts(log, rollouts)
    metrics = combine([log.read()])
    assert metrics["rollout/length_max"] == 40
    assert metrics["rollout/length_p50"] == 25
    assert metrics["rollout/truncated"] == 0.25
    assert metrics["reward/mean"] == metrics["reward/score"] == 0.75
    assert metrics["reward/std"] == pytest.approx(torch.tensor([1.0, 1, 0, 1]).std(correction=0).item())
    assert metrics["reward/zero_std_groups"] == 0.5


def test_drafts_are_counted_by_drafter_as_proposed_and_as_kept() -> None:
    drafts = [(0, "ngram", 3, 2), (4, "sibling", 2, 0), (5, "ngram", 1, 1)]
    response = Response(0, [2] * 9, [-1.0] * 9, "stop", (0,), drafts)
    rollouts = [Rollout(Prompt("q", [2]), response, "text", group, {"score": 1.0}, 1.0) for group in (0, 1)]
    log = IterationLog()
    log_rollouts(log, rollouts)
    metrics = combine([log.read()])
    assert {name: metrics[name] for name in metrics if name.startswith("speculation/")} == {
        "speculation/kept_ngram": 6.0,
        "speculation/proposed_ngram": 8.0,
        "speculation/proposed_sibling": 4.0,
    }


def test_tail_share_is_the_time_with_few_unfinished() -> None:
    trace = [(1.0, 20), (2.0, 10), (4.0, 2), (10.0, 0)]
    assert tail_share(trace, 20) == pytest.approx(0.6)
    assert tail_share([], 20) == 0.0


@pytest.mark.parametrize(
    ("trace", "num_requests", "share"),
    [([(0.0, 0)], 20, 0.0), ([(1.0, 2), (3.0, 1), (4.0, 0)], 5, 1 / 4), ([(1.0, 4), (4.0, 2), (5.0, 0)], 20, 1 / 5)],
)
def test_tail_share_of_few_requests_is_that_of_the_last(
    trace: list[tuple[float, int]], num_requests: int, share: float
) -> None:
    assert tail_share(trace, num_requests) == pytest.approx(share)


def test_metrics_of_a_step_are_sums_over_its_micro_batches() -> None:
    one, three = torch.tensor(1.0), torch.tensor(3.0)
    assert end_step([{"a": one}, {"a": three, "b": three}]) == {"a": 4.0, "b": 3.0}
    assert end_step([{"a_max": one}, {"a_max": three}, {}]) == {"a_max": 3.0}


def test_ranks_are_combined_as_each_number_says_even_where_one_lacks_it() -> None:
    logs = IterationLog(), IterationLog()
    for log, mean, largest, total in zip(logs, (1.0, 2.0), (9.0, 7.0), (1, 2), strict=True):
        log.mean("reward/mean", torch.tensor(mean))
        log.max("rollout/length_max", largest)
        log.max("rollout/length_max", 8.0)
        log.sum("reward/errors", total)
        log.sum("reward/errors", 10)
    logs[0].update({"speculation/acceptance_rate_pos_3": 0.5})
    assert combine([log.read() for log in logs]) == {
        "reward/errors": 23.0,
        "reward/mean": 1.5,
        "rollout/length_max": 9.0,
        "speculation/acceptance_rate_pos_3": 0.5,
    }


def test_a_number_is_reduced_in_one_way_only() -> None:
    log = IterationLog()
    log.mean("mine", 1.0)
    with pytest.raises(ValueError, match="`mine` was logged as `mean` and now as `sum`"):
        log.sum("mine", 1.0)


@pytest.mark.parametrize("value", [None, "0.5", torch.ones(2)])
def test_what_is_no_number_is_refused_by_its_name(value: Any) -> None:
    with pytest.raises(TypeError, match=r"`mine` has to be a number, or a tensor that holds one, got"):
        IterationLog().mean("mine", value)


def test_the_log_keeps_no_graph_of_a_tensor_alive() -> None:
    log = IterationLog()
    log.mean("mine", torch.ones(1, requires_grad=True) * 2)
    assert not log._numbers["mine"][1][0].requires_grad
    assert log.read()["mine"] == ("mean", 2.0)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the time of logs, for the test to set."""
    now = [100.0]
    monkeypatch.setattr(metrics_module, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    return now


def test_a_closed_log_takes_no_number_until_the_next_iteration_and_all_of_its_time(clock: list[float]) -> None:
    trainer: Any = SimpleNamespace(world_size=1)
    log = IterationLog()
    log.mean("mine", 1.0)
    clock[0] += 1.0
    log.lap("update")
    first = log.close(trainer)
    with pytest.raises(RuntimeError, match="`mine` comes after the iteration's log was closed"):
        log.mean("mine", 1.0)
    clock[0] += 2.0
    log.open()
    log.lap("other")
    second = log.close(trainer)
    assert first["mine"] == 1.0
    assert "mine" not in second
    assert second["time/other"] == second["time/iteration"] == 2.0
    assert first["time/iteration"] == 1.0


def test_stages_add_up_to_the_iteration(clock: list[float]) -> None:
    log = IterationLog()
    for stage, seconds in (("a", 2.0), ("b", 1.0), ("a", 1.0)):
        clock[0] += seconds
        log.lap(stage)
    assert combine([log.read()]) == {"time/iteration": 4.0, "time/a": 3.0, "time/b": 1.0}
    assert log.seconds("a") == 3.0


def test_the_peak_of_a_stage_is_the_largest_of_its_parts_and_of_the_ranks() -> None:
    class Peaks(PeakMemory):  # here is no GPU
        def __init__(self, *peaks: float | None) -> None:
            self.left = list(peaks)

        def take(self) -> float | None:
            return self.left.pop(0)

    trainer: Any = SimpleNamespace(world_size=1)
    logs = IterationLog(), IterationLog(), IterationLog()
    for log, peaks in zip(logs, ((3.0, 7.0, 1.0, 2.0), (5.0, 6.0, 1.0, 4.0), (None,) * 4), strict=True):
        log.peak_memory = Peaks(*(peak and peak * 2**30 for peak in peaks))
        for stage in ("rollout", "update", "rollout"):
            log.lap(stage)
    assert IterationLog().peak_memory.take() is None
    metrics = combine([log.read() for log in logs])
    peaks = {name: value for name, value in metrics.items() if name.startswith("memory/")}
    assert peaks == {"memory/peak_rollout": 5.0, "memory/peak_update": 7.0}
    logs[0].close(trainer)
    logs[0].open()
    logs[0].lap("update")
    assert logs[0].close(trainer)["memory/peak_update"] == 2.0


@pytest.mark.gpu
def test_the_peak_of_a_stage_is_what_the_device_held_in_it() -> None:
    gib = 2**30
    torch.cuda.init()
    peak = PeakMemory()
    kept = torch.empty(gib, dtype=torch.uint8, device="cuda")
    peak.take()
    before = torch.cuda.memory_allocated()
    del kept
    first = torch.empty(gib // 2, dtype=torch.uint8, device="cuda")
    with peak.followed(lambda: 0.0):  # what was held before counts
        del first
        torch.cuda.empty_cache()
    assert peak.take() == pytest.approx(before, abs=2**24)
    assert peak.take() == pytest.approx(torch.cuda.memory_allocated(), abs=2**24)


def test_what_a_sleeping_engine_has_unmapped_is_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = 7.0  # what PyTorch counts: 5 of the engine, 2 of the trainer
    monkeypatch.setattr(PeakMemory, "_is_measured", True)
    monkeypatch.setattr("torch.cuda.max_memory_allocated", lambda: counted)
    monkeypatch.setattr("torch.cuda.reset_peak_memory_stats", lambda: None)
    peak = PeakMemory()
    with peak.followed(lambda: 5.0):
        pass
    assert peak.take() == 7.0
    assert peak.take() == 2.0
    with peak.followed(lambda: 0.0):
        pass
    assert peak.take() == 7.0


def test_what_is_done_apart_is_taken_from_the_stage_around_it(clock: list[float]) -> None:
    log = IterationLog()
    clock[0] += 2.0
    with log.apart("checkpoint"):
        clock[0] += 3.0
    clock[0] += 1.0
    log.lap("update")
    assert combine([log.read()]) == {"time/iteration": 6.0, "time/checkpoint": 3.0, "time/update": 3.0}


def test_stages_are_known_in_the_order_in_which_they_passed_on_each_rank(clock: list[float]) -> None:
    trainer: Any = SimpleNamespace(world_size=1)
    log = IterationLog()
    for stage, seconds in (("sync", 1.0), ("rollout", 2.0), ("rollout", 1.0), ("update", 4.0)):
        clock[0] += seconds
        log.lap(stage)
    resumed = IterationLog()
    resumed.load_state_dict(log.state_dict())
    clock[0] += 0.5
    log.lap("rollout")
    for each, rest in ((log, [("rollout", 0.5)]), (resumed, [])):
        each.close(trainer)
        assert each.laps_by_rank == [[("sync", 1.0), ("rollout", 3.0), ("update", 4.0), *rest]]


def test_an_iteration_that_an_older_checkpoint_saved_keeps_its_seconds(clock: list[float]) -> None:
    log = IterationLog()
    log.load_state_dict({"numbers": {}, "seconds": {"rollout": 3.0, "other": 1.0}})
    assert (log.seconds("rollout"), log.seconds("other")) == (3.0, 1.0)
