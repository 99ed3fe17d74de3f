"""`python -m benchmarks schedules`: rollouts whose lengths are known, and costs that are."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest

from benchmarks.schedules import run as schedules
from benchmarks.schedules.cases import case_of
from benchmarks.schedules.costs import cost_of, fitted_cost
from benchmarks.schedules.worker import DrawGroup, Worker, seconds_of
from tlt_lightning.metrics import IterationLog
from tlt_lightning.schedules import PartialRollout, SynchronousSchedule, TailBatching


def in_turn(*groups: Sequence[int]) -> DrawGroup:
    """Groups one after the other, then from the first again; earlier answers were as long."""
    left: list[Sequence[int]] = []

    def draw(_: random.Random, iteration: int) -> tuple[Sequence[int], float]:
        left[:] = left or groups
        group = left.pop(0)
        return group, fmean(group)

    return draw


def test_a_rollout_runs_as_many_as_have_not_ended_and_what_is_deferred_is_not_begun() -> None:
    groups = in_turn([2, 5], [3, 9], [1, 2])
    whole = Worker(SynchronousSchedule(), 3, groups, 0).iterate(0, IterationLog())
    assert [*zip(whole.tokens, whole.running, strict=True)] == [(1, 6), (1, 5), (1, 3), (2, 2), (4, 1)]
    assert (whole.learned, whole.written, whole.aged) == (22, 22, 0)
    batched = Worker(TailBatching(0.5), 2, groups, 0)
    short, _, long = (batched.iterate(iteration, IterationLog()) for iteration in range(3))
    assert [*zip(short.tokens, short.running, strict=True)] == [(1, 4), (1, 3), (3, 1)]
    assert (short.learned, short.written) == (10, 10)
    assert [*zip(long.tokens, long.running, strict=True)] == [(3, 4), (6, 2)]  # the second group, drawn twice
    assert long.learned == 24


def test_what_is_continued_is_written_once_and_ages() -> None:
    worker = Worker(PartialRollout(0.5), 2, in_turn([2, 5], [3, 9], [1, 2]), 0)
    rollouts = [worker.iterate(iteration, IterationLog()) for iteration in range(2)]
    assert sum(each.written for each in rollouts) == sum(each.learned for each in rollouts) + sum(
        group.num_tokens for group in worker.backlog.deferred
    )
    assert [*zip(rollouts[1].tokens, rollouts[1].running, strict=True)] == [(2, 5), (1, 4), (1, 3), (1, 2)]
    assert rollouts[1].aged == 3 + 5  # tokens of the group that was put aside, whose second response had 4 to go
    assert [each.read for each in rollouts] == [0, 5]
    assert seconds_of(rollouts[1:], np.ones(513), reading_ms=10.0) == (5 + 50) / 1e3


def test_a_token_costs_what_the_best_draft_length_makes_of_it_and_goes_on_in_a_line() -> None:
    cost = cost_of({0: ([1, 101, 201], [5, 6, 8]), 3: ([1, 101, 201], [6, 20, 40])}, {0: 1.0, 3: 3.0})
    assert cost[[1, 51, 101, 201, 301]] == pytest.approx([2, 13 / 3, 6, 8, 10])
    lengths = [[10, 20], [5, 30], [7, 9]]
    line, fit = fitted_cost(lengths, [(2 * max(each) + 0.5 * sum(each)) / 1e3 for each in lengths])
    assert line[[0, 10]] == pytest.approx([2, 7])
    assert fit["worst_error"] == pytest.approx(0, abs=1e-9)


def test_workers_wait_for_the_last() -> None:
    groups = in_turn(*([length] * 64 for length in (1, 2, 3, 4)))
    case = case_of("in turn", groups, 4, workers=4)
    found = schedules.simulate(case, "synchronous", {"all alike": (np.ones(513), 0.0)}, iterations=2, seed=0)
    assert found["seconds"] == {"all alike": 0.004}
    assert found["idle"] == {"all alike": 1 - 2.5 / 4}
    assert found["steps"] == 4


def test_tail_batching_saves_steps_where_earlier_answers_tell_and_throws_nothing_away() -> None:
    def draw_group(draw: random.Random, iteration: int) -> tuple[list[int], float]:
        length = 100 if draw.random() < 0.1 else draw.choice([8, 10])
        return [length] * 8, float(length)

    costs = {"all alike": (np.ones(513), 0.0)}
    case = case_of("few long", draw_group, 100)
    assert case.has_earlier
    assert case.groups == pytest.approx(0.1, abs=0.02)
    rows = {row["schedule"]: row for row in schedules.against_synchronous(case, costs, iterations=10)}
    batched = rows["TailBatching(0.25)"]
    assert batched["relative"]["all alike"] == pytest.approx(1 - batched["saved_steps"])
    assert batched["saved_steps"] > 0.5
    assert not any(name.startswith("Partial") for name in rows)


@pytest.mark.slow
def test_the_simulator_is_near_what_was_measured(tmp_path: Path) -> None:
    schedules.main(["--tiny", "--out", str(tmp_path)])
    found = {row["results"]: row for row in json.loads((tmp_path / "schedules.json").read_text())["check"]}
    row = found["25m_two_gpus"]
    for name in ("relative", "seconds", "tokens_written"):
        assert row["simulated"][name] == pytest.approx(row["measured"][name], rel=0.07)
    page = (tmp_path / "schedules.md").read_text()
    assert "| `25m_schedules`, at most 2,048, halves | 1 | TailBatching(0.25) |" in page
