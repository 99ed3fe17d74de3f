"""The Countdown reward: does the final expression use every given number once and reach the target?

Only what follows the answer marker counts, so wrong turns in the search before it cost nothing.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

ANSWER = "<answer>"
"""What a response writes before its final expression; the last one counts, and `</answer>` may close it."""

_MAX_CHARS = 512  # far above any honest answer, far below what slows the parser down
_EXPRESSION = re.compile(r"[0-9+\-*/()\s]+")
_PROMPT = re.compile(r"^\s*(\d+(?:\s+\d+)*)\s*=\s*(\d+)\s*:", re.MULTILINE)
_OPERATIONS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def countdown(prompt: str, response: str, row: dict[str, Any]) -> float:
    """Score a Countdown response: 1 if its final answer is a correct solution, else 0.

    Args:
        prompt: The question; read only if `row` has no `numbers`, and then it must hold a line like `3 7 25 = 46 :`.
        response: The search, then `<answer>` and an expression such as `( 3 + 7 ) * 5 - 4`; everything before the
            last marker is ignored.
        row: The row of the data file, with `numbers` (what must be used, each exactly once) and `target` or `answer`.

    Returns:
        1.0 or 0.0.

    Raises:
        ValueError: Neither the row nor the prompt says what the question is.

    Example:
        >>> countdown("3 7 25 = 46 :", "3 * 7 = 21 + 25 = 46 <answer> 3 * 7 + 25", {})
        1.0
    """
    numbers, target = _question(prompt, row)
    _, marker, answer = response.rpartition(ANSWER)
    answer = answer.partition("</answer>")[0].strip()
    if not marker or len(answer) > _MAX_CHARS or not _EXPRESSION.fullmatch(answer):
        return 0.0
    used: list[int] = []
    try:
        value = _evaluate(ast.parse(answer, mode="eval").body, used)
    except (SyntaxError, ValueError, ZeroDivisionError):
        return 0.0
    return float(value == target and sorted(used) == sorted(numbers))


def _question(prompt: str, row: dict[str, Any]) -> tuple[list[int], Fraction]:
    if "numbers" in row:
        if "target" not in row and "answer" not in row:
            raise ValueError(f"`row` has `numbers` but neither `target` nor `answer`; its columns are {sorted(row)}.")
        return [int(number) for number in row["numbers"]], Fraction(row["target"] if "target" in row else row["answer"])
    found = _PROMPT.search(prompt)
    if found is None:
        raise ValueError(
            f"`row` has no `numbers` and `prompt` has no line like '3 7 25 = 46 :', got {prompt[:80]!r}; add the columns "
            "`numbers` and `answer` to the data file."
        )
    return [int(number) for number in found[1].split()], Fraction(found[2])


def _evaluate(node: ast.expr, used: list[int]) -> Fraction:
    """Value of a parsed expression; appends the numbers it uses to `used`."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        used.append(node.value)
        return Fraction(node.value)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        left, right = _evaluate(node.left, used), _evaluate(node.right, used)
        return _OPERATIONS[type(node.op)](left, right)
    raise ValueError(f"not an expression over + - * /: {ast.dump(node)[:80]}")
