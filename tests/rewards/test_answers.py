"""The rewards that compare a final answer: exact match, multiple choice; and the format reward."""

from __future__ import annotations

import time
from typing import Any, ClassVar

import pytest

from tlt_lightning.rewards import Format, countdown, exact_match, math_equivalence, multiple_choice
from tlt_lightning.rewards.answers import expected_answer, last_boxed


def test_exact_match_ignores_surrounding_space_only() -> None:
    assert exact_match("", " four \n", {"answer": "four"}) == 1.0
    assert exact_match("", "4", {"answer": 4}) == 1.0
    assert exact_match("", "Four", {"answer": "four"}) == 0.0
    assert exact_match("", "four four", {"answer": "four"}) == 0.0


def test_whole_numbers_that_a_gap_in_their_column_made_floats_are_whole_again() -> None:
    assert exact_match("", "5", {"answer": 5.0}) == 1.0
    assert exact_match("", "2.5", {"answer": 2.5}) == 1.0
    assert exact_match("", "5.0", {"answer": "5.0"}) == 1.0


@pytest.mark.parametrize("row", [{}, {"answer": None}, {"answer": "  "}, {"answer": float("nan")}])
def test_a_row_without_an_answer_is_an_error(row: dict) -> None:
    with pytest.raises(ValueError, match=r"`row\['answer'\]`"):
        expected_answer(row)


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        (r"\boxed{1} then \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{7} and then \boxed{8", "7"),
        (r"\boxed{1} \boxed{a{2}\boxed{3", "1"),
        (r"\boxed{\boxed{2}{\boxed{3", "2"),
        ("7", None),
    ],
)
def test_last_boxed_balances_braces(text: str, inside: str | None) -> None:
    assert last_boxed(text) == inside


def test_a_response_that_repeats_an_open_box_is_read_once() -> None:
    class Counted(str):
        __slots__ = ()
        places: ClassVar[list] = []

        def __getitem__(self, place: Any) -> str:
            self.places.append(place)
            return super().__getitem__(place)

    text = Counted(r"\boxed{" * 1000)
    assert last_boxed(text) is None
    assert len(text.places) <= 2 * len(text)


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"A looks right, but \boxed{B}", "B"),
        (r"\boxed{\text{(C)}}, not the answer is (D)", "C"),
        ("The answer is (B). Options C and D are wrong.", "B"),
        ("**Answer:** C", "C"),
        ("The answer is **D**.", "D"),
        ("the answer is (e)", "E"),
        ("First the answer is A. Wait, the answer is B", "B"),
        ("It must be D or E, so E. A dog told me.", "E"),
        ("E", "(E)"),
        ("The answer is (2).", "2"),
        (r"\boxed{B}", "2"),
        ("<think>Perhaps the answer is A.</think> <answer>C</answer>", "C"),
        ("<think>Perhaps the answer is A.</think> C", "C"),
        ("I choose 3", 3),
        ("The answer is A because iron rusts.", "A"),
        ("The answer is A because B is wrong", "A"),
        ("**The answer is:** A and not B", "A"),
        ("**Answer**: A since B is wrong", "A"),
        ("Answer: A quick check gives us option B", "B"),
        ("Answer A is wrong, B is right", "B"),
        ("The answer A gives is wrong; choose B", "B"),
        ("The answer is\nA long story. So B.", "B"),
        ("**Answer:** A plant needs light. B", "B"),
        ("In answer A we have two errors, therefore B", "B"),
        ("I'll explain my answer: A metal rusts, hence (B).", "B"),
        ("It is not answer A because iron rusts. So B.", "B"),
    ],
)
def test_multiple_choice_finds_the_option(response: str, answer: str | int) -> None:
    assert multiple_choice("", response, {"answer": answer}) == 1.0
    other = {"A": "B", "1": "2"}.get(str(answer), "A" if not str(answer).isdigit() else "1")
    assert multiple_choice("", response, {"answer": other}) == 0.0


@pytest.mark.parametrize(
    "response", ["", "the answer is a banana", r"\boxed{Paris}", "Because", "the answer is 2.5", "2"]
)
def test_multiple_choice_without_a_choice_earns_nothing(response: str) -> None:
    for answer in "ABCDE":
        assert multiple_choice("", response, {"answer": answer}) == 0.0


def test_multiple_choice_refuses_an_answer_that_is_no_option() -> None:
    with pytest.raises(ValueError, match="from A to E"):
        multiple_choice("", "B", {"answer": "Paris"})


def test_format_default_wants_one_thought_and_one_answer() -> None:
    reward = Format()
    good = "<think>\na < b\n</think>\n<answer>4</answer>\n"
    assert reward("", good, {}) == 1.0
    for bad in ("4", good + "more", good + "<answer>5</answer>", "<think>" + good, good.replace("</think>", "")):
        assert reward("", bad, {}) == 0.0


def test_format_default_takes_linear_time() -> None:
    start = time.thread_time()  # of the processor: others may want it, too
    assert Format()("", "<think>" + "<a" * 200_000, {}) == 0.0
    assert time.thread_time() - start < 10  # where the square of the length would take hours


def test_every_reward_for_answers_reads_the_default_format() -> None:
    response = "<think>the answer is (A): 6 * 7 = 41?</think> <answer>{}</answer>"
    assert Format()("", response.format(42), {}) == math_equivalence("", response.format(42), {"answer": 42}) == 1.0
    assert Format()("", response.format("B"), {}) == multiple_choice("", response.format("B"), {"answer": "B"}) == 1.0
    sums = response.format("6 * 7")
    assert Format()("", sums, {}) == countdown("", sums, {"answer": 42, "numbers": [6, 7]}) == 1.0


def test_format_matches_a_pattern_from_end_to_end() -> None:
    reward = Format(r".*#### \d+")
    assert reward("", "1 + 1\n#### 2", {}) == 1.0
    assert reward("", "#### 2 apples", {}) == 0.0


def test_format_refuses_a_broken_pattern() -> None:
    with pytest.raises(ValueError, match=r"`pattern` must be a regular expression, got '\('"):
        Format("(")


@pytest.mark.parametrize("answer", [{"ground_truth": "4", "style": "rule"}, ["4", "four"]])
def test_an_answer_with_parts_is_no_text_to_compare_with(answer: object) -> None:
    with pytest.raises(ValueError, match=r"which is [{\[].* here; .*write a reward that reads `row` itself"):
        exact_match("", "4", {"answer": answer})


def test_a_row_without_an_answer_names_the_argument_and_the_columns_that_the_data_has() -> None:
    with pytest.raises(ValueError, match=r"is None here; fill it in, .* set `answer_column` .*: level, solution\."):
        exact_match("", "4", {"solution": "4", "level": 1, "answer": None})
