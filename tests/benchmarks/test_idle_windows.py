"""`python -m benchmarks idle_windows`: what it counts, compares and reports; the runs themselves need two devices."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.end_to_end import idle_windows
from tlt_lightning.engine.base import RolloutProgress
from tlt_lightning.long_tail.budget import FixedBudget


def logged(micro_steps: float) -> dict[str, float]:
    """Means over two ranks, one of which does not train."""
    means = {"idle_seconds_available": 1.0, "idle_seconds_used": 0.9 if micro_steps else 0.0, "preemption_ms": 12.0}
    return {f"drafter/{name}": value for name, value in {"micro_steps": micro_steps, **means}.items()}


def recorded(paces: list[float], learning: int = 2) -> list[dict[str, Any]]:
    """From the iteration behind the learning on every second one trains."""
    rows: list[dict[str, Any]] = []
    for iteration, pace in enumerate(paces, 1):
        trains = 1 < iteration <= learning or (iteration > learning and iteration % 2 == 0)
        row = idle_windows.row_of(iteration, logged(5.0 * trains), 2, learning)
        rows.append({**row, "pace": pace})
    return rows


def report_of(paces: list[float]) -> str:
    about = {"size": "25m", "command": "c", "hardware": "h", "versions": {}, "seed": 0, "note": ""}
    work = {"devices": 2, "each": 8, "group_size": 8, "long": 9, "short": 3, "learning": 2, "lr": 1.0}
    return "\n".join(idle_windows.render({**about, "work": work, "iterations": recorded(paces)}))


def test_steps_count_from_when_the_last_window_opens() -> None:
    steps = [0.0, 1.0, 2.0, 3.0, 3.5, 4.0, 4.25, 4.5]
    assert idle_windows.pace_of([1.5, 3.0], steps) == 4 / 1.5
    for opened, seen in (([1.5, None], steps), ([9.0], steps), ([1.0], [])):
        assert idle_windows.pace_of(opened, seen) is None


def test_numbers_are_of_the_ranks_that_wait() -> None:
    row = idle_windows.row_of(9, logged(5.0), 2, 4)
    assert (row["micro-steps"], row["idle s"], row["used s"], row["left late by ms"]) == (10.0, 2.0, 1.8, 12.0)
    assert idle_windows.row_of(9, logged(5.0), 4, 4)["micro-steps"] == pytest.approx(5 * 4 / 3)
    assert idle_windows.row_of(9, logged(0.0), 2, 4)["left late by ms"] is None


def test_an_iteration_is_judged_by_what_was_done_in_it() -> None:
    kinds = [row["kind"] for row in recorded([1.0] * 6)]
    assert kinds == ["warm-up", "learning", "waiting", "training", "waiting", "training"]


def test_ratios_are_those_of_neighbours_and_neither_warm_up_nor_learning_counts() -> None:
    found = idle_windows.summarise(recorded([1.0, 1.0, 100.0, 99.0, 100.0, 105.0, 110.0]))
    assert found["ratio"] == [0.99, 1.0]  # over the mean of both neighbours


@pytest.mark.parametrize(("pace", "answer"), [(98.5, "0.9850: kept."), (97.5, "0.9750: **not kept**.")])
def test_the_report_gives_the_answer(pace: float, answer: str) -> None:
    report = report_of([1.0, 1.0, 100.0, pace, 100.0])
    assert f"the median is {answer}" in report
    assert "use 90% of the idle time" in report
    assert "| 4 | training | 2 | 1.8 | 10 | 12 |" in report


def test_a_run_that_has_just_begun_has_a_report() -> None:
    for length in range(1, 4):
        assert "Not measured" in report_of([1.0] * length)


def test_the_late_rank_has_the_last_lengths() -> None:
    work = idle_windows.work_of(idle_windows.parse(["--tiny"]))
    assert work.lengths == [[16] * 8 + [128] * 8] * 9
    assert (work.prompts, work.accumulate, work.max_tokens) == (4, 2, 128)


def test_a_rank_alone_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        idle_windows.parse(["--tiny", "--devices", "1"])
    assert "`--devices` 1 must be at least 2" in capsys.readouterr().err
    assert idle_windows.parse(["--tiny"]).learning == 3


def test_once_learning_is_over_nothing_moves_and_every_second_window_trains() -> None:
    witness = idle_windows.Witness(2, lambda rows: None)
    witness.drafting = SimpleNamespace(budget=FixedBudget(0.0))  # type: ignore[assignment]
    weight = torch.ones(3, requires_grad=True)
    optimizer = torch.optim.AdamW([weight], lr=0.1, weight_decay=0.0)
    optimizer.register_step_pre_hook(witness.hold)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)  # sets the rate anew after each step
    seen = []
    for epoch in range(4):
        witness.on_rollout_start(SimpleNamespace(current_epoch=epoch), None)  # type: ignore[arg-type]
        weight.grad = torch.ones(3)
        optimizer.step()
        schedule.step()
        seen.append((weight[0].item(), witness.drafting.budget.every_n_iterations))
    assert seen[0][0] > seen[1][0] == seen[2][0] == seen[3][0]
    assert [every for _, every in seen] == [1, 1, 2, 2]
    witness.on_rollout_progress(None, None, RolloutProgress(0, 3, 0, 1, 1, 0.1))  # type: ignore[arg-type]
    assert len(witness._steps) == 1
