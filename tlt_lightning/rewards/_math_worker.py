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
    from sympy import Eq, Expr, Mul, Pow, UnevaluatedExpr

    def factors(value: Any) -> list[Any]:
        return [each for part in value.args for each in factors(part)] if isinstance(value, Mul) else [value]

    def is_scale(factor: Any) -> bool:  # a sign, a percentage, a power of ten, a denominator
        is_power = isinstance(factor, Pow) and (factor.base == 10 or factor.exp == -1)
        return is_power or isinstance(factor, UnevaluatedExpr) or abs(factor) == 1

    def is_number(value: Any) -> bool:
        others = [each for each in factors(value) if not is_scale(each)]
        return len(others) <= 1 and all(each.is_Number for each in others)

    if not found or not isinstance(expected[0], Expr) or not is_number(expected[0]):
        return True
    answer = found[0].rhs if isinstance(found[0], Eq) else found[0]
    is_quotient = any(sign in str(found[-1]) for sign in ("frac", "/", ":"))
    return isinstance(answer, Expr) and is_number(answer) and not (is_quotient and expected[0].is_Integer)


if __name__ == "__main__":
    main()
