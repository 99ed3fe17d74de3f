"""Compare expressions by math-verify: a script that runs without the package."""

import re
from math import gcd
from typing import Any

from math_verify import parse, verify
from math_verify.grader import take_last_relation
from sympy import And, Eq, Expr, Float, Integer, Mul, Pow, Rational, Set, UnevaluatedExpr

UNDONE = (r"\int", r"\sum", r"\prod", r"\lim", r"\fracd")
"""Beginnings of LaTeX that is no answer, except where it is expected."""
MIXED = re.compile(r"(?<![\w.,])(\d{1,9}) +(\d{1,9})/(\d{1,9})\b")
"""Matches a mixed number such as `3 1/2`, which math-verify takes for 2."""


def answer(gold: str, text: str, prompt: str) -> bool:
    """Return True if the answer in `text` equals `gold`, and does not repeat an expression of the prompt."""
    gold, text = (MIXED.sub(lambda m: f"{int(m[1]) * int(m[3]) + int(m[2])}/{m[3]}", each) for each in (gold, text))
    expected = parse(rf"\boxed{{{gold}}}", parsing_timeout=None)
    if not expected:
        raise ValueError(f"no expression in the expected answer {gold!r}")
    found = parse(text, parsing_timeout=None)
    return is_computed(expected, found, prompt) and verify(expected, found, timeout_seconds=None)


def is_computed(expected: list[Any], found: list[Any], prompt: str) -> bool:
    r"""Return False if what was found still has to be computed.

    To math-verify `3 + 4 + 2` equals 9, so a policy would learn to write the question as its answer. Where a number is
    expected, only a number is computed: a fraction if that is no integer, and not one of the prompt's that is still to
    be reduced; `50\%` and `4 \times 10^2` always. Else an integral is not, nor is an expression that stands in the
    prompt and is not written as expected.
    """

    def last(value: Any) -> Any:  # the right side of an equation or of a chain of them, what a set holds
        if isinstance(value, And | Eq):
            return last(take_last_relation(value).rhs)
        return last(value.args[-1]) if isinstance(value, Set) and value.args else value

    def factors(value: Any) -> list[Any]:
        return [each for part in value.args for each in factors(part)] if isinstance(value, Mul) else [value]

    def is_scale(factor: Any) -> bool:  # a sign, a percentage, a power of ten, a denominator
        is_denominator = isinstance(factor, Pow) and factor.exp == -1 and isinstance(factor.base, Float | Integer)
        is_power_of_ten = isinstance(factor, Pow) and factor.base == 10
        return is_denominator or is_power_of_ten or factor in (-1, UnevaluatedExpr(Rational(1, 100)))

    def is_number(value: Any) -> bool:
        parts = factors(value)
        others = [each for each in parts if not is_scale(each)]
        return len(others) <= 1 and all(each.is_Number for each in others) and sum(each.is_Pow for each in parts) <= 1

    if not found:
        return True
    wanted, answer, gold, text = last(expected[0]), last(found[0]), squeezed(expected[-1]), squeezed(found[-1])
    if not isinstance(wanted, Expr) or not is_number(wanted):
        if isinstance(wanted, Mul) and 0 in factors(wanted):  # to math-verify `0x1f` is a product
            return text == gold
        is_done = not any(sign in text and sign not in gold for sign in UNDONE)
        is_new = text not in squeezed(prompt) or not re.search(r"[-+*/^\\]", text)
        return is_done and (is_new or text.rpartition("=")[2] == gold.rpartition("=")[2])
    if isinstance(expected[0], Eq) and isinstance(found[0], Eq) and not verify(wanted, answer, timeout_seconds=None):
        return False
    parts = re.findall(r"\d+", str(found[-1])) if "frac" in text or "/" in text else []
    in_prompt = r"(?<!\d){}\W{{1,4}}{}(?!\d)"
    if len(parts) == 2 and gcd(*map(int, parts)) > 1 and re.search(in_prompt.format(*parts), prompt):
        return False
    text = text.rpartition("=")[2]
    if not isinstance(answer, Expr) or answer.is_Symbol:  # the latter of `\text{9}`
        return isinstance(answer, Expr)
    operators = (r"\ln", "div", "÷", "binom", "choose", "matrix")  # what math-verify computes while it parses
    fractions = ("frac", "/", ":") if wanted.is_Integer else ()
    return is_number(answer) and not any(sign in text for sign in operators + fractions)


def squeezed(text: Any) -> str:
    """Return LaTeX without what does not change its meaning."""
    return re.sub(r"\\(?:left|right|text|[,;! ])|(?<=\\)[dt](?=frac)|[\s${}]", "", str(text))


answer("0.5", r"\boxed{\frac{1}{2}}", "")  # fills the caches of the parser
