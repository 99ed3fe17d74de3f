"""Environments written with the classes of `verifiers` up to 0.3, for its own Python."""

import asyncio
import json
import os
import time
from pathlib import Path
from typing import Any

import verifiers as vf
from datasets import Dataset


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


class Counting(vf.MultiTurnEnv):
    """Says the number of each turn, three times; of some rows it does what it is told to."""

    async def env_response(self, messages: Any, state: Any, **kwargs: Any) -> Any:
        match state["answer"]:
            case "raises":
                raise KeyError("made to fail")
            case "hangs":
                await asyncio.sleep(600)
            case "blocks":
                time.sleep(600)
            case "dies":
                os._exit(3)
        return [{"role": "user", "content": f"= {len(state['trajectory'])} :"}]

    async def get_prompt_messages(self, state: Any) -> Any:
        messages = await super().get_prompt_messages(state)
        return messages[-1:] if state["answer"] == "forgets" else messages


def record(state: Any) -> float:
    """Write what the library has recorded of a rollout's tokens."""
    if place := os.environ.get("RECORDED"):
        steps = [step["tokens"] for step in state["trajectory"]]
        with Path(place).open("a") as file:
            print(json.dumps({"answer": state["answer"], "steps": steps}), file=file)
    return 0.0


def even(completion: Any) -> float:
    """Return the share of even words in what the policy said."""
    words = [word for message in completion if message.role == "assistant" for word in (message.content or "").split()]
    return sum(word.isdigit() and int(word) % 2 == 0 for word in words) / max(1, len(words))


def load_environment(tools: bool = False, answers: tuple[str, ...] = ("1", "2", "3", "4")) -> vf.Environment:
    """Make an environment with a row for each answer."""
    rows = Dataset.from_list([{"question": f"{number} 9 =", "answer": answer} for number, answer in enumerate(answers)])
    rubric = vf.Rubric(funcs=[even, record], weights=[1.0, 0.0])
    if tools:
        return vf.ToolEnv(dataset=rows, rubric=rubric, tools=[add], max_turns=4)
    return Counting(dataset=rows, rubric=rubric, max_turns=3)
