r"""Score answers that are mathematically equal to the expected one, judged by math-verify.

math-verify runs in child processes. A response such as `\boxed{9^{9^{9}}}` holds the interpreter's lock for as long as
it computes, which would stop the rollout past any time limit of a thread; and algebra would compete with the engine.
"""

import re
from fractions import Fraction
from pathlib import Path
from typing import Any

from tlt_lightning.rewards.answers import expected_answer, final_part, last_boxed
from tlt_lightning.rewards.children import Children

CHILDREN = Children(Path(__file__).with_name("_math_answer.py"))

CURRENCY = r"(?:\\?[$€£¥])?"

SCALE = r"(?:hundred|thousand|[mbt]r?illion|dozen)(?:ths?|s)?\b"

POSTFIX = (
    r"(?:halves|(?:third|(?:four|fif|six|seven|eigh|nin|ten)th)(?:s|(?! +(?!of\b)[a-z]))|squared|cubed|factorial)\b"
)
"""Matches words that make another number of the one just before them. `3 third graders` are 3."""

UNIT = (
    rf"(?i:\s*[€£¥°]|(?!.*\b(?:{SCALE}|(?:half|percent|sqrt|sin|cos|tan|log)\b)|\s+{POSTFIX})"
    r"\s+[a-z]{3,}(?:\s+[a-z]+)*)?"
)
"""Matches the words or the sign that may follow a number, none of them a factor."""

MULTIPLIED = rf"(?i:[\s$]*(?:{SCALE}|{POSTFIX})(?!-)\D*)"
"""Matches what follows a number up to the end of a text: a word that makes another number of it, and no digit."""

TAIL = 2000
"""Characters at the end of a response in which an answer that is not marked is looked for."""


def math_equivalence(prompt: str, response: str, row: dict[str, Any]) -> float:
    r"""Return 1 if the final answer equals the expected one as a mathematical object, else 0.

    Within the last `<answer>` block, or everywhere without one, the final answer is the last `\boxed{...}`, or what
    follows the last `####` (the form of GSM8K; a heading is none), or else what math-verify takes near the end: what
    follows the last "answer is", even if the text goes on, or the last expression or number. The answer column may hold
    LaTeX, a number, or a whole GSM8K solution; `$18`, `18 dollars` and 18 are the same. What `</think>` ends holds no
    answer. Where a number is expected, an expression that still has to be computed is none: `3 + 4 + 2` is not 9, but
    the question. Elsewhere an expression of the prompt is no answer, unless it is written as expected.
    `2 trillion` and `2 thirds` are not 2 where `\boxed`, `####`, `<answer>`, "answer is" or "answer:" marks them and no
    further number follows.

    Raises:
        TimeoutError: If the comparison takes longer than `TIME_LIMIT`.

    Example:
        >>> math_equivalence("", r"Thus \boxed{\frac{1}{2}}.", {"answer": "0.5"})
        1.0
    """
    gold = after_hashes(expected_answer(row)) or expected_answer(row)
    text, is_block = final_part(response.replace("\u2212", "-"))  # the latter is the sign's other code point
    tail = text[-TAIL:].replace(r"\$", "")
    wanted, answer = plain_number(gold, UNIT), last_boxed(text) or after_hashes(text)
    if not text and wanted is not None:  # asked of every row before a run
        return 0.0
    if wanted and plain_number(re.split(r"(?i)answer(?: is|[*:])+", answer or tail)[-1], MULTIPLIED) == wanted:
        return 0.0  # math-verify takes `2 trillion` for 2
    if answer is None and not is_block:
        return float(CHILDREN.ask(gold, tail, prompt))
    found = plain_number(answer or text, UNIT)
    if wanted is not None and found is not None:
        return float(wanted == found)
    is_equal = CHILDREN.ask(gold, rf"\boxed{{{answer or text}}}", prompt)
    return float(is_equal or (answer is None and CHILDREN.ask(gold, tail, prompt)))  # perhaps within a sentence


math_equivalence.load = CHILDREN.load  # type: ignore[attr-defined]


def after_hashes(text: str) -> str | None:
    """Return the line after the last `####` that is no heading: ends `text` or starts a number."""
    for match in reversed(list(re.finditer(r"(?<!#)####(?!#)\s*(\S.*)", text))):
        line = match.group(1).strip()
        if plain_number(line) is not None or not text[match.end() :].strip():
            return line
    return None


def plain_number(text: str, unit: str = "") -> Fraction | None:
    """Return the value of a plain decimal number, a currency's sign, thousands separators and markup allowed."""
    text = re.sub(r"\\(?:text|math)\w*\{([^{}]*)\}|\*\*|\\[!,]", r"\1", text).strip()
    number = r"(?:\d{1,3}(?:,\d{3})+|\d{1,30})(?:\.\d{1,30})?"
    found = re.fullmatch(rf"{CURRENCY}([+-]?){CURRENCY}({number}){unit}\.?", text)
    return Fraction(found.group(1) + found.group(2).replace(",", "")) if found else None
