"""Score responses that are the answer and nothing else."""

from __future__ import annotations

from typing import Any

from tlt_lightning.rewards.answers import expected_answer


def exact_match(prompt: str, response: str, row: dict[str, Any]) -> float:
    r"""Return 1 if the response is the answer, surrounding white space aside, else 0.

    Example:
        >>> exact_match("2 + 2 =", " 4\n", {"answer": 4})
        1.0
    """
    return float(response.strip() == expected_answer(row))
