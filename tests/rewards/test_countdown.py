import json
from pathlib import Path

import pytest

from tlt_lightning.rewards.countdown import countdown

ASSETS = Path(__file__).parents[2] / "recipes" / "assets" / "countdown"
ROW = {"numbers": [3, 7, 25], "answer": 46}


def score(answer: str, row: dict[str, object]) -> float:
    return countdown("make 46 from 3 7 25 :", f"7 - 3 = 4 no <answer> {answer}", {**ROW, **row})


@pytest.mark.parametrize(
    "answer", ["3 * 7 + 25", "25 + (7*3)", "( ( 3 * 7 ) + 25 )", "25+3*7</answer> done", " \n25 + 3 * 7\n"]
)
def test_correct_expression_scores_one(answer: str) -> None:
    assert score(answer, {}) == 1.0


@pytest.mark.parametrize(
    ("answer", "row"),
    [
        pytest.param("3 + 7 + 25", {}, id="misses_the_target"),
        pytest.param("46", {}, id="states_the_target"),
        pytest.param("21 + 25", {}, id="uses_a_partial_result"),
        pytest.param("25 + 7 * 3 * 3 / 3", {}, id="repeats_a_number"),
        pytest.param("25 + 7", {"answer": 32}, id="leaves_a_number_out"),
        pytest.param("3 * 7 + 25 = 46", {}, id="adds_an_equation"),
        pytest.param("25 / ( 7 - 7 )", {"numbers": [25, 7, 7]}, id="divides_by_zero"),
        pytest.param("3 ** 7", {"numbers": [3, 7], "answer": 2187}, id="power"),
        pytest.param("7 // 3", {"numbers": [7, 3], "answer": 2}, id="floor_division"),
        pytest.param("- 3 + 7 + 25", {"answer": 29}, id="unary_minus"),
        pytest.param("25 + 7 ( 3 )", {}, id="call"),
        pytest.param("__import__('os').getcwd()", {}, id="code"),
        pytest.param("( 3 * 7 + 25", {}, id="unclosed"),
        pytest.param("(" * 250 + "3" + ")" * 250, {"numbers": [3], "answer": 3}, id="nested_too_deep"),
        pytest.param("3 *" + " " * 600 + "7 + 25", {}, id="too_long"),
        pytest.param("", {}, id="empty"),
    ],
)
def test_wrong_or_malformed_answer_scores_zero(answer: str, row: dict[str, object]) -> None:
    assert score(answer, row) == 0.0


def test_division_is_exact() -> None:
    row = {"numbers": [8, 3, 8, 3], "answer": 24}
    assert countdown("", "<answer> 8 / ( 3 - 8 / 3 )", row) == 1.0


def test_only_the_text_after_the_last_marker_counts() -> None:
    right, wrong = "3 * 7 + 25", "3 + 7 + 25"
    assert countdown("", f"3 * 7 = 99 no <answer> {wrong} <answer> {right}", ROW) == 1.0
    assert countdown("", f"<answer> {right} <answer> {wrong}", ROW) == 0.0
    assert countdown("", right, ROW) == 0.0
    assert countdown("", f"<think> <answer> {right} </answer> </think> {right}", ROW) == 0.0


@pytest.mark.parametrize(
    "row",
    [
        *[{"answer": 46}, {"numbers": [3, 7, 25]}, {"numbers": None, "answer": 46}, {"numbers": 3, "answer": 46}],
        *[{"numbers": [3, 7, 25], "answer": answer} for answer in (None, "none", "", "1/0", float("inf"), [46])],
    ],
)
def test_missing_question_is_an_error(row: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="a column `numbers` with a list and the target"):
        countdown("make 46 from 3 7 25 :", "<answer> 3 * 7 + 25", row)


def questions(name: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in (ASSETS / name).read_text().splitlines()]


def test_quickstart_holds_its_validation_questions_out() -> None:
    def keys(name: str) -> set[tuple[object, ...]]:
        return {(row["answer"], *sorted(row["numbers"])) for row in questions(name)}

    assert len(questions("train.jsonl")) >= 2000
    assert len(questions("val.jsonl")) >= 128
    assert not keys("train.jsonl") & keys("val.jsonl")


def test_quickstart_tokenizer_keeps_numbers_whole_and_is_readable() -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(ASSETS / "policy")
    text = "make 33 from 3 7 12 : 7 * 3 = 21 - 12 = 9 no 3 * 7 = 21 + 12 = 33 yes <answer> ( 3 * 7 ) + 12<eos>"
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text.replace("<eos>", " <eos>").split())
    assert ids[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(ids) == text
    response = tokenizer.decode(ids[7:], skip_special_tokens=True)
    assert countdown("", response, {"numbers": [3, 7, 12], "answer": 33}) == 1.0


def test_quickstart_assets_stay_small() -> None:
    assert sum(path.stat().st_size for path in ASSETS.rglob("*") if path.is_file()) <= 4 * 2**20
