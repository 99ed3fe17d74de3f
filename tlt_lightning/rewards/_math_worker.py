"""Compare expressions, one JSON line in, one out: a script that runs without the package."""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import sys
from typing import Any

MAX_MEMORY = 4 << 30


def main() -> None:
    """Answer requests until standard input closes."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever libraries print must not look like a reply
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    logging.disable()  # math-verify warns that its own time limit, which arithmetic on huge integers ignores, is off
    for line in sys.stdin:
        gold, text, time_limit = json.loads(line)
        try:
            reply = (compare(gold, text, time_limit), "")
        except Exception as error:
            reply = (False, f"{type(error).__name__}: {error}")
        print(json.dumps(reply), file=replies)


def compare(gold: str, text: str, time_limit: float) -> bool:
    """Return True if the answer in `text` equals `gold`; die of SIGALRM after `time_limit` s."""
    from math_verify import parse, verify

    # Left at its default action: the kernel ends the process even while an arithmetic operation holds the interpreter.
    signal.setitimer(signal.ITIMER_REAL, time_limit)
    try:
        expected = parse(rf"\boxed{{{gold}}}", parsing_timeout=None)
        if not expected:
            raise ValueError(f"no expression in the expected answer {gold!r}")
        found = parse(text, parsing_timeout=None)
        return is_computed(expected, found) and verify(expected, found, timeout_seconds=None)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def is_computed(expected: list[Any], found: list[Any]) -> bool:
    r"""Return False if a number is expected, and what was found still has to be computed.

    To math-verify `3 + 4 + 2` equals 9, so a policy would learn to write the question as its answer. A fraction is a
    number where no integer is expected, `50\%` and `4 \times 10^2` always.
    """
    from math_verify.grader import take_last_relation
    from sympy import And, Eq, Expr, Float, Integer, Mul, Pow, Rational, Set, UnevaluatedExpr

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

    wanted = last(expected[0])
    if not found or not isinstance(wanted, Expr) or not is_number(wanted):
        return True
    answer, text = last(found[0]), str(found[-1]).rpartition("=")[2]
    if not isinstance(answer, Expr) or answer.is_Symbol:  # the latter of `\text{9}`
        return isinstance(answer, Expr)
    operators = ("div", "÷", "binom", "choose", "matrix")  # what math-verify computes while it parses
    fractions = ("frac", "/", ":") if wanted.is_Integer else ()
    return is_number(answer) and not any(sign in text for sign in operators + fractions)


if __name__ == "__main__":
    main()
