"""Compare expressions, one JSON line in, one out: a script that runs without the package."""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import sys

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
        return verify(expected, parse(text, parsing_timeout=None), timeout_seconds=None)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


if __name__ == "__main__":
    main()
