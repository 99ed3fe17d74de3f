"""RewardTerm, by hand and from YAML, and what importing the package costs."""

from __future__ import annotations

import copy
import functools
import subprocess
import sys
from typing import Any

import pytest
from jsonargparse import ArgumentParser

from tlt_lightning import rewards
from tlt_lightning.rewards import (
    Format,
    PythonTests,
    RewardModel,
    RewardPool,
    RewardTerm,
    countdown,
    exact_match,
    math_equivalence,
    multiple_choice,
)
from tlt_lightning.rewards.term import as_terms, check_rows

ALL_TERMS = """
terms:
  - function: tlt_lightning.rewards.exact_match
  - function: tlt_lightning.rewards.countdown
    weight: 0.5
    name: solved
  - function: tlt_lightning.rewards.math_equivalence
  - function: tlt_lightning.rewards.multiple_choice
  - function:
      class_path: tlt_lightning.rewards.Format
      init_args:
        pattern: .*42
  - function:
      class_path: tlt_lightning.rewards.Format
    name: tags
  - function:
      class_path: tlt_lightning.rewards.PythonTests
      init_args:
        time_limit: 2
  - function:
      class_path: tlt_lightning.rewards.RewardModel
      init_args:
        model: some/model
        max_length: 128
    weight: 0
"""


def parse(text: str) -> list[RewardTerm]:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--terms", type=list[RewardTerm])
    config = parser.parse_string(text)
    again = parser.parse_string(parser.dump(config))
    assert parser.dump(again) == parser.dump(config)
    return parser.instantiate_classes(again).terms


class Scale:
    def __init__(self, factor: float) -> None: ...

    def __call__(self, prompt: str, completion: str, row: dict[str, Any]) -> float:
        return 0.0


@pytest.mark.parametrize(
    ("function", "takes"),
    [
        (lambda prompt, response: 0.0, "prompt, response"),
        (lambda response, prompt, row: 0.0, "response, prompt, row"),
        (lambda prompt, row, response: 0.0, "prompt, row, response"),
        (lambda prompt, response, answer: 0.0, "prompt, response, answer"),
        (lambda data_source, solution_str, ground_truth: 0.0, "data_source, solution_str, ground_truth"),
        (lambda *, prompt, response, row: 0.0, r"\*, prompt, response, row"),
        (lambda prompt, response, **row: 0.0, r"prompt, response, \*\*row"),
        (lambda prompt, ground_truth, row: 0.0, "prompt, ground_truth, row"),
        (Scale, "factor.*"),
    ],
)
def test_a_function_that_cannot_be_called_by_place_is_refused(function: Any, takes: str) -> None:
    with pytest.raises(TypeError, match=rf"takes \({takes}\).*, and is called by place with \(prompt, response, row\)"):
        RewardTerm(function=function)


@pytest.mark.parametrize("function", [Scale(2.0), lambda *given: 0.0, lambda a, b, c, d=1: 0.0, max])
def test_a_function_that_can_be_called_by_place_is_taken_alone(function: Any) -> None:
    (term,) = as_terms(function)
    assert term.function is function


def test_terms_come_from_yaml() -> None:
    terms = parse(ALL_TERMS)
    names = [
        "exact_match",
        "solved",
        "math_equivalence",
        "multiple_choice",
        "Format",
        "tags",
        "PythonTests",
        "RewardModel",
    ]
    assert [term.name for term in terms] == names
    assert [term.weight for term in terms] == [1, 0.5, 1, 1, 1, 1, 1, 0]
    assert terms[0].function is exact_match
    assert terms[1].function is countdown
    assert isinstance(terms[4].function, Format)
    assert terms[4].function("", "It is 42", {}) == 1.0
    assert isinstance(terms[6].function, PythonTests)
    assert terms[6].function.time_limit == 2
    assert isinstance(terms[7].function, RewardModel)
    assert terms[7].function.max_length == 128


def test_terms_can_be_deep_copied() -> None:
    assert [term.name for term in copy.deepcopy(parse(ALL_TERMS))] == [term.name for term in parse(ALL_TERMS)]


@pytest.mark.parametrize(
    "function", ["tlt_lightning.rewards.nothing", "{class_path: tlt_lightning.rewards.Format, init_args: {patern: a}}"]
)
def test_yaml_refuses_unknown_functions_and_arguments(function: str) -> None:
    with pytest.raises(Exception, match=r"nothing|patern"):
        parse(f"terms: [{{function: {function}}}]")


async def slow_judge(prompt: str, response: str, row: dict[str, Any]) -> float:
    return 1.0


def scaled(scale: float, prompt: str, response: str, row: dict[str, Any]) -> float:
    return scale


def test_names_follow_the_function() -> None:
    assert RewardTerm(function=slow_judge).name == "slow_judge"
    assert RewardTerm(function=functools.partial(scaled, 2.0)).name == "scaled"
    assert RewardTerm(function=lambda prompt, response, row: 1.0, name="one").name == "one"


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"function": "exact_match"}, TypeError, "`function` must be a function or a class"),
        ({"function": exact_match, "name": "mean"}, ValueError, "taken by the metric `reward/mean`"),
        ({"function": exact_match, "weight": float("nan")}, ValueError, "`weight` must be a finite number"),
    ],
)
def test_bad_terms_are_refused(arguments: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        RewardTerm(**arguments)


def trl_length(prompts: list, completions: list, answer: list, **columns: Any) -> list[float]:
    return [
        len(completion) + len(prompt) + x for prompt, completion, x in zip(prompts, completions, answer, strict=True)
    ]


def trl_conversations(completions: list, **columns: Any) -> list[float | None]:
    return [None if turns[0]["content"] == "skip" else float(turns[0]["role"] == "assistant") for turns in completions]


async def trl_async(completions: list, **columns: Any) -> list[float]:
    return [2.0 for _ in completions]


def test_functions_of_trl_are_called_for_one_response() -> None:
    terms = [RewardTerm(function=f) for f in (trl_length, trl_conversations, trl_async)]
    assert [term.name for term in terms] == ["trl_length", "trl_conversations", "trl_async"]
    assert terms[0]("question", "four", {"prompt": "question", "answer": 100}) == [112]
    turns = [{"role": "user", "content": "question"}]
    assert terms[1]("question", "four", {"prompt": turns}) == [1.0]
    assert terms[1]("question", "four", {"notes": [], "prompt": "other", "messages": turns}) == [1.0]
    pool = RewardPool(terms)
    for number, response in enumerate(("four", "skip")):
        pool.submit(number, "question", response, {"prompt": turns, "answer": 0})
    assert pool.collect() == {
        0: {"trl_length": 2.0, "trl_conversations": 1.0, "trl_async": 2.0},
        1: {"trl_length": 2.0, "trl_async": 2.0},  # the other does not apply
    }
    assert not any(pool.stats.values())
    pool.close()


@pytest.mark.parametrize("returned", [1.0, "1", [], [1.0, 0.0], None])
def test_a_function_of_trl_that_returns_no_list_of_one_is_told_what_to_return(returned: Any) -> None:
    def trl_wrong(completions: list, **columns: Any) -> Any:
        return returned

    term = RewardTerm(function=trl_wrong)
    with pytest.raises(TypeError, match=r"returned .* for one completion; .*`completions`.* a list with one score"):
        term.score_of(term("question", "four", {}))


def trl_bare(completions: list, solution: list) -> list[float]:
    return [float(text == right) for text, right in zip(completions, solution, strict=True)]


def test_a_function_of_trl_gets_no_more_than_it_takes() -> None:
    term = RewardTerm(function=trl_bare)
    assert term("question", "4", {"prompt": "question", "answer": None, "solution": "4"}) == [1.0]
    every = RewardTerm(function=lambda completions, **columns: [sorted(columns)])
    assert every("question", "4", {"prompt": "question", "answer": None}) == [["answer", "prompts"]]


@pytest.mark.parametrize("function", [countdown, exact_match, math_equivalence, multiple_choice])
def test_a_row_that_a_reward_cannot_score_is_named_before_a_rollout(function: Any) -> None:
    terms = as_terms([trl_length, function])
    rows = {3: {"answer": "2", "numbers": [1, 1]}, 7: {"answer": None, "numbers": [1, 1]}}
    with pytest.raises(
        ValueError, match=rf"Row 7 of `path` 'a' \(from 0\) .* by reward `{function.__name__}`: .* None"
    ):
        check_rows(terms, rows, "`path` 'a'")
    check_rows(terms, {3: rows[3]}, "`path` 'a'")
    check_rows(terms, rows, "`path` 'a'", are_scored=False)
    check_rows(terms[:1], rows, "`path` 'a'")


def test_functions_of_a_list_become_terms() -> None:
    term = RewardTerm(function=exact_match, weight=0.5)
    assert as_terms([slow_judge, term]) == [RewardTerm(function=slow_judge), term]


def test_what_is_no_reward_and_two_of_one_name_are_refused() -> None:
    with pytest.raises(TypeError, match="`function` must be a function or a class"):
        as_terms(["exact_match"])
    with pytest.raises(ValueError, match=r"`rewards` holds 2 of the name 'exact_match'.*; set `name`"):
        as_terms([exact_match, exact_match])


def test_every_public_name_exists() -> None:
    assert all(getattr(rewards, name) is not None for name in rewards.__all__)
    assert callable(rewards.countdown)


def test_importing_rewards_loads_nothing_heavy() -> None:
    code = (
        "import sys, tlt_lightning.rewards.countdown, tlt_lightning.rewards as rewards\n"
        "assert callable(rewards.countdown)\n"
        "print(*({'torch', 'transformers', 'math_verify', 'sympy', 'lightning', 'vllm'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=250, check=True)
    assert done.stdout.split() == []
