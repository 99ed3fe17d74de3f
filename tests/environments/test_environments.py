"""What a class of environments offers."""

import functools
import threading
from typing import Any

import pytest

from tlt_lightning.environments.environments import Environments
from tlt_lightning.environments.turn import ToolCall, read_calls

NO_TEMPLATE: Any = object()  # a tokenizer that does not read responses


class Tools:
    def __init__(self, level: int = 1) -> None:
        self.level = level

    def reset(self, **row: Any) -> None: ...

    def guess(self, number: int) -> str:
        """Guess it.

        Args:
            number: The guess.
        """
        return str(number)

    def _helper(self) -> None: ...

    @property
    def broken(self) -> int:
        raise RuntimeError("was computed")


class Undescribed:
    def reset(self, **row: Any) -> None: ...

    def guess(self, number):  # type: ignore[no-untyped-def]
        return number


def test_public_methods_are_tools_with_schemas() -> None:
    environments = Environments(Tools)
    assert list(environments.tools) == ["guess"]
    assert environments.tools["guess"]["function"]["parameters"]["properties"]["number"]["type"] == "integer"
    assert (environments.name, environments.has_reward, environments.plays_text) == ("Tools", False, False)


@pytest.mark.parametrize("made_by", [functools.partial(Tools, level=3), Tools(level=3)])
def test_environments_are_made_as_they_are_needed_and_used_again(made_by: Any) -> None:
    environments = Environments(made_by)
    first, second = environments.take(), environments.take()
    assert first is not second
    assert (first.level, second.level) == (3, 3)
    environments.give_back(first)
    assert environments.take() is first


@pytest.mark.parametrize(
    ("made_by", "message"),
    [
        (
            {"class_path": "my.Game", "init_args": {"levle": 3}},
            r"'levle'.*no method `reset`; .* must find its `class_path`",
        ),
        (Undescribed, r"`environment.guess` is public.*docstring"),
    ],
)
def test_what_is_no_environment_is_refused(made_by: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        Environments(made_by)


class OneColumn:
    def reset(self, answer: int) -> None: ...


class NoColumns:
    def reset(self) -> None: ...


@pytest.mark.parametrize("made_by", [OneColumn, NoColumns])
def test_a_reset_that_does_not_take_a_row_is_refused_before_a_rollout(made_by: Any) -> None:
    Environments(Tools).check_reset({"prompt": "1", "answer": 1})
    with pytest.raises(
        TypeError, match="columns of a row, prompt, answer: got an unexpected keyword argument 'prompt'"
    ):
        Environments(made_by).check_reset({"prompt": "1", "answer": 1})


def test_an_environment_that_cannot_be_copied_is_named() -> None:
    environment: Any = Tools()
    environment.lock = threading.Lock()
    with pytest.raises(TypeError, match="pickle"):
        Environments(environment)


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("no call", []),
        ('<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>', [ToolCall("f", {"x": 1})]),
        ('<tool_call>{"name": "f"}</tool_call> and <tool_call>{"name": "g"}', [ToolCall("f", {}), ToolCall("g", {})]),
    ],
)
def test_calls_are_read_as_hermes_writes_them(text: str, calls: list[ToolCall]) -> None:
    assert read_calls(NO_TEMPLATE, text, [1], [], [])[1] == calls


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("<tool_call>{name</tool_call>", "no JSON"),
        ("<tool_call>[1]</tool_call>", "A call must be"),
        ("<tool_call>" + 5000 * "1", "no JSON"),  # Python reads no such number, nor so deep a list
        ("<tool_call>" + 100_000 * "[", "no JSON"),
    ],
)
def test_a_call_that_cannot_be_read_says_why(text: str, why: str) -> None:
    _, (call,) = read_calls(NO_TEMPLATE, text, [1], [], [])
    assert why in call.error
