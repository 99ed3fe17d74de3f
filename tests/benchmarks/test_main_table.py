"""The main table: ratios of arms that ran beside each other, and what it says where one is missing."""

import argparse
import importlib
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import BENCHMARKS
from benchmarks.main_table import Step, cold_rows, iteration_rows, render, rollout_rows, run, steps_of


def runs(mode: str, **seconds: list[float]) -> list[dict[str, Any]]:
    return [{"arm": arm, "mode": mode, "seconds": each} for arm, times in seconds.items() for each in times]


def iterations(mode: str, arm: str, seconds: list[float]) -> dict[str, Any]:
    rows = [{"iteration": number + 1, "metrics": {"time/iteration": each}} for number, each in enumerate(seconds)]
    return {"arm": arm, "mode": mode, "iterations": rows}


def test_a_rollout_is_compared_with_plain_and_with_the_better_of_vllm_s_own() -> None:
    measured = runs("replayed", plain=[20.0, 22.0, 21.0], adaptive=[10.0, 10.0, 7.0])
    measured += runs("replayed", **{"adaptive, sampled drafts": [5.0, 5.0, 5.0]})
    measured += runs("replayed", **{"vLLM K=3": [14.0, 15.0, 14.0], "vLLM K=5": [12.5, 12.0, 13.0]})
    rows = rollout_rows({"about": [{"size": "7b"}], "runs": [*measured, *runs("record", plain=[99.0])]})
    found = {(row.claim, row.baseline): (round(row.value, 3), round(row.low, 3), round(row.high, 3)) for row in rows}
    assert found == {
        ("rollout, vLLM's own EAGLE-3 at its best K", "plain vLLM"): (1.68, 1.6, 1.833),
        ("rollout, adaptive", "plain vLLM"): (2.1, 2.0, 3.0),
        ("rollout, adaptive, sampled drafts", "plain vLLM"): (4.2, 4.0, 4.4),
        ("rollout, adaptive", "vLLM's own EAGLE-3"): (1.25, 1.2, 1.857),
        ("rollout, adaptive, sampled drafts", "vLLM's own EAGLE-3"): (2.5, 2.4, 2.6),
    }
    assert {row.repetitions for row in rows} == {3}


def test_an_iteration_is_compared_after_the_warm_up_and_a_missing_arm_leaves_its_row_out() -> None:
    arms = [iterations("replay", "plain", [50.0, 12.0, 14.0]), iterations("replay", "frozen", [60.0, 6.0, 7.0])]
    (row,) = iteration_rows({"size": "main_iteration", "warmup": 1, "runs": arms})
    assert (row.claim, row.value, row.baseline) == ("iteration, frozen", 2.0, "the same without a head")


def test_a_run_from_no_head_counts_as_many_iterations_of_both() -> None:
    plain, head = [10.0] * 5, [12.0, 4.0, 3.0, 3.0, 3.0, 1.0]
    arms = [iterations("natural", "plain", plain), iterations("natural", "random-siblings", head)]
    (row,) = cold_rows({"runs": arms})
    assert (row.claim, row.value) == ("5 iterations from no head, its training included", 50 / 25)
    cut_off = iterations("natural", "random-siblings", [36.0])
    assert not cold_rows({"runs": [arms[0], cut_off]})


class Parsed(Exception):
    """Raised where a benchmark has read its command line."""


@pytest.mark.parametrize("tiny", [False, True])
def test_each_step_is_a_command_that_its_benchmark_understands(tiny: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    read = argparse.ArgumentParser.parse_args

    def parse_and_stop(parser: argparse.ArgumentParser, arguments: list[str]) -> None:
        read(parser, arguments)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop)
    for step in steps_of(Path("results"), tiny=tiny).values():
        benchmark = importlib.import_module(BENCHMARKS[step.command[0]])
        with pytest.raises(Parsed):
            benchmark.main([*step.command[1:], "--out", "results", "--seed", "0"])


def test_a_step_that_fails_is_said_below_the_table(tmp_path: Path) -> None:
    fault = run(Step(["no such benchmark"], 60, "nothing"), tmp_path, seed=0)
    assert fault == "ended with status 1"
    record = {"size": "tiny", "command": "python -m benchmarks main_table", "hardware": "2 CPU cores", "note": ""}
    results = {"about": record | {"versions": {}, "seed": 0}, "rows": [], "seconds": {"cold": 1.0}}
    said = render(results | {"faults": {"cold": fault}})[-1]
    assert said == "- `cold` ended with status 1: what it had not measured is missing."


@pytest.mark.parametrize("tiny", [True, False])
def test_all_steps_fit_into_half_an_hour(tiny: bool, tmp_path: Path) -> None:
    assert sum(step.seconds for step in steps_of(tmp_path, tiny=tiny).values()) <= 1830
