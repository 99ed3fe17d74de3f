"""Score Countdown: the final expression uses every given number once and is the target.

Only what follows the answer marker counts, so wrong turns in the search before it cost nothing.
"""

import ast
import operator
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from tlt_lightning.rewards.answers import final_part

_MAX_CHARS = 512  # far above any honest answer, far below what slows the parser down
_EXPRESSION = re.compile(r"[0-9+\-*/()\s]+")
_OPERATIONS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def countdown(prompt: str, response: str, row: dict[str, Any]) -> float:
    """Return 1 if the final answer of a Countdown response is correct, else 0.

    Args:
        prompt: Not read; the row says what the question is.
        response: The search, which is ignored, then `<answer>` and an expression such as `( 3 + 7 ) * 5 - 4`;
            `</answer>` may close it, and the last one counts.
        row: The row of the data file, with `numbers` (each must be used exactly once) and `answer` (the target).

    Raises:
        ValueError: The row lacks `numbers` or an answer, or they are no numbers.

    Example:
        >>> countdown("", "3 * 7 = 21 + 25 = 46 yes <answer> 3 * 7 + 25", {"numbers": [3, 7, 25], "answer": 46})
        1.0
    """
    try:
        numbers, target = sorted(int(number) for number in row["numbers"]), Fraction(row["answer"])
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise ValueError(
            "`countdown` needs a column `numbers` with a list and the target in the answer column, got "
            f"{row.get('numbers')!r:.200} and {row.get('answer')!r:.200}; the columns are {sorted(row)}."
        ) from error
    answer, is_marked = final_part(response)
    if not is_marked or len(answer) > _MAX_CHARS or not _EXPRESSION.fullmatch(answer):
        return 0.0
    used: list[int] = []
    try:
        value = _evaluate(ast.parse(answer, mode="eval").body, used)
    except (SyntaxError, ValueError, ZeroDivisionError):
        return 0.0
    return float(value == target and sorted(used) == numbers)


def _evaluate(node: ast.expr, used: list[int]) -> Fraction:
    """Compute the value of a parsed expression; append the numbers it uses to `used`."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        used.append(node.value)
        return Fraction(node.value)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        left, right = _evaluate(node.left, used), _evaluate(node.right, used)
        return _OPERATIONS[type(node.op)](left, right)
    raise ValueError(f"not an expression over + - * /: {ast.dump(node)[:80]}")
