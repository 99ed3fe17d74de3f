"""Score an answer by the verifier of a task: a script that runs without the package."""

from functools import cache
from typing import Any

from reasoning_gym.factory import get_score_answer_fn

verifier = cache(get_score_answer_fn)


def answer(task: str, text: str, entry: dict[str, Any]) -> float:
    """Return the score of `text` as an answer to the question of `entry`."""
    return float(verifier(task)(text, entry))
