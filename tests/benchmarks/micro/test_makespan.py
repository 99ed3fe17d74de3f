"""Makespans from step times that are added up by hand."""

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.micro.makespan import costs_of, main, makespans, seconds_of

STEPS = {"1,0": 4.0, "4,0": 10.0, "1,3": 6.0}


def test_a_step_costs_what_its_requests_do_and_the_best_k_is_taken_where_it_was_measured() -> None:
    alone, drafting = costs_of(STEPS, acceptance=0.5)
    assert alone[1:].tolist() == [4.0, 6.0, 8.0, 10.0]
    assert drafting[1] == 6.0 / (1 + 0.5 + 0.25 + 0.125)
    assert drafting[2:].tolist() == [6.0, 8.0, 10.0]


def test_an_engine_gets_faster_as_requests_end_and_the_last_engine_counts() -> None:
    cost = np.array([np.nan, 4.0, 6.0, 8.0, 10.0])
    assert seconds_of([3, 1, 3, 2], cost) == pytest.approx((10 + 8 + 6) / 1e3)
    seconds, idle = makespans([[3, 1, 3, 2], [1, 1, 1, 1]], 2, cost)
    first, second = 6 + 4 + 4, 6 + 6 + 4
    assert seconds == pytest.approx((second + 6) / 2 / 1e3)
    assert idle == pytest.approx(1 - (first + second + 12) / 2 / (second + 6))


def test_arrangements_of_the_files_are_rows(tmp_path: Path) -> None:
    run = {"arm": "plain", "mode": "natural", "seed": 0, "iterations": [{"lengths": [3, 1, 3, 2]}]}
    (tmp_path / "lengths.json").write_text(json.dumps({"runs": [run]}))
    for ranks in (1, 2):
        found = {"about": {"size": "7b shape"}, "tensor_parallel": ranks, "bucketed": {"step_ms": STEPS}}
        (tmp_path / f"{ranks}.json").write_text(json.dumps(found))
    given = [str(tmp_path / f"{ranks}.json") for ranks in (1, 2)]
    main(["--gpus", "2", "--lengths", str(tmp_path / "lengths.json"), "--out", str(tmp_path), "--steps", *given])
    assert "| 7b shape | 1 x TP 2 | 0.024 | 0% |" in (tmp_path / "makespan.md").read_text()
