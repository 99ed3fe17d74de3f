from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tlt_lightning.metrics import iteration_log
from tlt_lightning.metrics.iteration_log import IterationLog, combine
from tlt_lightning.metrics.peak_memory import PeakMemory


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the time of logs, for the test to set."""
    now = [100.0]
    monkeypatch.setattr(iteration_log, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    return now


def test_ranks_are_combined_as_each_number_says_even_where_one_lacks_it() -> None:
    logs = IterationLog(), IterationLog()
    for log, mean, largest, total in zip(logs, (1.0, 2.0), (9.0, 7.0), (1, 2), strict=True):
        log.mean("reward/mean", torch.tensor(mean))
        log.max("rollout/length_max", largest)
        log.max("rollout/length_max", 8.0)
        log.sum("reward/errors", total)
        log.sum("reward/errors", 10)
        log.update({"engine/queue_max": largest, "engine/queue": largest})
    logs[0].update({"speculation/acceptance_rate_pos_3": 0.5})
    assert combine([log.read() for log in logs]) == {
        "engine/queue": 8.0,
        "engine/queue_max": 9.0,
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
    log.mean("next", 3.0)
    log.lap("other")
    second = log.close(trainer)
    assert log.by_rank == [second]
    assert second["next"] == 3.0
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
    for log, peaks in zip(logs, ((9.0, 3.0, 7.0, 1.0, 2.0), (9.0, 5.0, 6.0, 1.0, 4.0), (None,) * 5), strict=True):
        log.peak_memory = Peaks(*(peak and peak * 2**30 for peak in peaks))
        log.clear()  # what was held before is none of it
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
    clock[0] += 0.5
    log.lap("rollout")
    log.close(trainer, {"engine 3": [("writing", 8.0)]})
    assert log.laps_by_rank == [[("sync", 1.0), ("rollout", 3.0), ("update", 4.0), ("rollout", 0.5)]]
    assert log.laps_by_engine == {"engine 3": [("writing", 8.0)]}
    log.open()
    log.close(trainer)
    assert log.laps_by_engine == {}
