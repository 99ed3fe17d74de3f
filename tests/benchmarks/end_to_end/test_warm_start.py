"""The task of the warm start: an answer that the policy never writes, and texts that do."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.end_to_end import warm_start
from tlt_lightning.rewards.countdown import countdown
from tlt_lightning.tasks import ReasoningGym

ROW = {"prompt": "make 21 from 3 7 :", "answer": 21, "numbers": [3, 7]}


@pytest.mark.parametrize(
    ("answer", "score"),
    [("21 = 3 * 7", 1.0), ("3 * 7", 0.0), ("20 = 3 * 7", 0.0), ("21 = 3 + 7", 0.0), ("= 3 * 7", 0.0), ("21 =", 0.0)],
)
def test_only_a_right_equation_earns_a_reward(answer: str, score: float) -> None:
    response = f" 3 + 7 = 10 no 3 * 7 = 21 yes <answer> {answer}"
    assert warm_start.equation(ROW["prompt"], response, ROW) == score
    assert warm_start.equation(ROW["prompt"], response.replace("<answer> ", ""), ROW) == 0


def test_the_texts_are_right_searches_that_end_in_equations(tmp_path: Path) -> None:
    warm_start.write_equations(tmp_path / "texts.jsonl", 40)
    rows = [json.loads(line) for line in (tmp_path / "texts.jsonl").read_text().splitlines()]
    assert len(rows) == 40
    for row in rows:
        _, target, _, *numbers, _ = row["prompt"].split()
        question: dict[str, Any] = {"answer": int(target), "numbers": [*map(int, numbers)]}
        assert warm_start.equation(row["prompt"], row["completion"], question) == 1
        assert countdown(row["prompt"], row["completion"], question) == 0  # as the quickstart scores them


def test_worked_products_are_right_and_of_questions_that_nobody_is_judged_by(tmp_path: Path) -> None:
    warm_start.write_products(tmp_path / "texts.jsonl", 30)
    rows = [json.loads(line) for line in (tmp_path / "texts.jsonl").read_text().splitlines()]
    questions = list(ReasoningGym(**warm_start.products(30)["init_args"]))
    assert [row["prompt"] for row in rows] == [row["prompt"] for row in questions[warm_start.HELD_OUT :]]
    for row, question in zip(rows, questions[warm_start.HELD_OUT :], strict=True):
        assert warm_start.product("", row["answer"], question) == 1
        assert {eval(part) for part in row["answer"].split("=")} == {int(question["answer"])}
        assert warm_start.product("", row["answer"] + " or 7", question) == 0
        assert warm_start.product("", "nobody knows", question) == 0


def test_a_run_is_a_row() -> None:
    run = {"arm": "GRPO", "seed": 1, "iterations": 2, "seconds": 5.0, "sft_seconds": 0.0}
    curves = {"reward/mean": [(1, 0.1), (2, 0.3)], "val/accuracy": [(0, 0.0), (2, 0.5)]}
    _, rows = warm_start.rows_of([{**run, "curves": curves}])
    assert rows == [["GRPO", 1, 2, 0.0, 0.5, 0.1, 0.3, 0.0, 5.0]]
