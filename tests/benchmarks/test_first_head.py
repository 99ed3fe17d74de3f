"""Arm `paired` of `end_to_end/run.py`: the head a run began with beside the one that is trained along."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.end_to_end.first_head import FirstHead
from benchmarks.end_to_end.report import paired_table
from benchmarks.end_to_end.work import FIRST_HEAD
from tests.long_tail.test_trainer import OneWeight, make_buffer
from tlt_lightning.long_tail.buffer import DrafterBuffer
from tlt_lightning.metrics import IterationLog, combine


class JudgedWeight(OneWeight):
    """Says what it was measured with."""

    def measure(self, batch: Any) -> Any:
        self.rows = self.policy_rows.tolist()
        return super().measure(batch)


def test_the_first_head_is_measured_beside_the_policy_of_now_and_put_away_again() -> None:
    drafter = JudgedWeight(0.25)
    drafting: Any = SimpleNamespace(drafter=drafter, buffer=make_buffer(), pack_tokens=128)
    trainer: Any = SimpleNamespace()
    module: Any = SimpleNamespace(device=torch.device("cpu"), iteration_log=IterationLog())
    callback = FirstHead(drafting)
    callback.on_fit_start(trainer, module)
    with torch.no_grad():
        drafter.fc.fill_(0.75)
        drafter.policy_rows.fill_(5.0)
    callback.on_rollout_start(trainer, module)
    logged = combine([module.iteration_log.read()])
    assert logged[f"{FIRST_HEAD}acceptance_length"] == pytest.approx(1.25)
    assert logged["time/drafter"] > 0
    assert drafter.rows == [5.0, 5.0]
    assert drafter.fc.tolist() == [0.75, 0.75]

    drafting.buffer, module.iteration_log = DrafterBuffer(1 << 20), IterationLog()
    FirstHead(drafting).on_rollout_start(trainer, module)
    assert module.iteration_log.read() == {}  # nothing was held out yet


def test_a_paired_run_is_told_in_quarters() -> None:
    rows: list[dict[str, Any]] = [{"iteration": 1, "metrics": {"reward/mean": 0.5, "time/iteration": 1.0}}]
    for iteration in range(2, 10):
        metrics = {"drafter/policy_drift": iteration / 10, "reward/mean": 0.5, "time/iteration": 1.0}
        for name, value in (("length", 2.0), ("rate_pos_1", 0.6), ("rate_pos_3", 0.2)):
            metrics |= {f"drafter/acceptance_{name}": value + 0.1, f"{FIRST_HEAD}acceptance_{name}": value}
        rows.append({"iteration": iteration, "metrics": metrics})
    run = {"arm": "paired", "mode": "natural", "seed": 7, "iterations": rows}
    lines = [line for line in paired_table([run]) if line.startswith("| natural")]
    assert lines[0] == "| natural 7 | 2 to 3 | 0.300 | 2.000, 2.100 | 0.600, 0.700 | 0.200, 0.300 |"
    assert len(lines) == 4
    assert lines[-1].startswith("| natural 7 | 8 to 9 | 0.900 |")
    assert paired_table([{**run, "iterations": rows[:1]}]) == []
