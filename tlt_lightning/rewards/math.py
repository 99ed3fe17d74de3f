r"""Score answers that are mathematically equal to the expected one, judged by math-verify.

math-verify runs in child processes. A response such as `\boxed{9^{9^{9}}}` holds the interpreter's lock for as long as
it computes, which would stop the rollout past any time limit of a thread; and algebra would compete with the engine.
"""

from __future__ import annotations

import re
from fractions import Fraction
from pathlib import Path
from typing import Any

from tlt_lightning.rewards.answers import expected_answer, final_part, last_boxed
from tlt_lightning.rewards.children import Children

CHILDREN = Children(Path(__file__).with_name("_math_answer.py"))

TAIL = 2000
"""Characters at the end of a response in which an answer that is not marked is looked for."""


def math_equivalence(prompt: str, response: str, row: dict[str, Any]) -> float:
    r"""Return 1 if the final answer equals the expected one as a mathematical object, else 0.

    Within the last `<answer>` block, or everywhere without one, the final answer is the last `\boxed{...}`, or what
    follows the last `####` (the form of GSM8K; a heading is none), or else what math-verify takes near the end: what
    follows the last "answer is", even if the text goes on, or the last expression or number. The answer column may hold
    LaTeX, a number, or a whole GSM8K solution. Where it is a number, an expression that still has to be computed is
    none: `3 + 4 + 2` is not 9, but the question.

    Raises:
        TimeoutError: If the comparison takes longer than `TIME_LIMIT`.

    Example:
        >>> math_equivalence("", r"Thus \boxed{\frac{1}{2}}.", {"answer": "0.5"})
        1.0
    """
    gold = after_hashes(expected_answer(row)) or expected_answer(row)
    block = final_part(response)
    text = response if block is None else block
    answer = last_boxed(text) or after_hashes(text) or block
    if answer is None:
        return float(CHILDREN.ask(gold, response[-TAIL:]))
    numbers = plain_number(gold), plain_number(answer)
    if None not in numbers:
        return float(numbers[0] == numbers[1])
    is_sentence = answer == block  # perhaps, with the answer somewhere in it
    return float(CHILDREN.ask(gold, rf"\boxed{{{answer}}}") or (is_sentence and CHILDREN.ask(gold, answer[-TAIL:])))


def after_hashes(text: str) -> str | None:
    """Return the line after the last `####` that is no heading: ends `text` or starts a number."""
    for match in reversed(list(re.finditer(r"(?<!#)####(?!#)\s*(\S.*)", text))):
        line = match.group(1).strip()
        if plain_number(line) is not None or not text[match.end() :].strip():
            return line
    return None


def plain_number(text: str) -> Fraction | None:
    """Return the value of a plain decimal number, dollar sign and thousands separators allowed."""
    digits = re.fullmatch(r"(?:\\?\$)?([+-]?(?:\d{1,3}(?:,\d{3})+|\d{1,30})(?:\.\d{1,30})?)\.?", text.strip())
    return Fraction(digits.group(1).replace(",", "")) if digits else None
