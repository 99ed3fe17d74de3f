"""Score Python code by its unit tests."""

import contextlib
import json
import logging
import os
import re
import secrets
import select
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

from tlt_lightning.arguments import Bound, Positive, checked

log = logging.getLogger(__name__)

START_LIMIT = 20.0
"""Seconds in which the process of a program must be ready to run it, on a loaded machine too."""

# In front of a fence its indentation, a list's marker included; behind the last one perhaps no fence.
FENCED_BLOCK = re.compile(
    r"^([ \t]*(?:(?:[-*+]|\d+[.)])[ \t]+)?)```[ \t]*([\w+-]*)[^\n]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE
)
DEFINED = re.compile(r"^(?:(?:async[ ]+def|def|class)[ ]+(\w+)|(\w+)[ ]*(?::[^=\n]*)?=(?!=))", re.MULTILINE)


class PythonTests:
    r"""Gives 1 to a response whose Python code passes the unit tests of its row, else 0.

    Isolation against accidents, not attackers. The code runs in a process group of its own with limits on wall-clock
    time, processor time, memory and file size, in an empty temporary folder with a minimal environment. Linux, where
    the kernel allows it, adds process and network namespaces: nothing the code starts outlives it and no network is
    reachable. Elsewhere Python refuses to open sockets, programs that the code starts may still use the network or
    survive, and a warning says so. Either way the code can read and delete your files and forge its result. Run
    untrusted policies in a container. A class whose `__eq__` is True of anything fails, the simplest of forgeries.

    The code is the response's last fenced block that defines a name which the tests use (later blocks show its use), or
    else the last one, or else the whole response; blocks marked as Python go before others. The row holds `test`:
    either a HumanEval script that defines `check(candidate)`, with `entry_point` naming the function to check and
    `prompt` the code that the response continues or rewrites; or a script or list of asserts.

    Args:
        time_limit: Seconds from the program's start until the tests fail; keep it below the reward pool's time limit.
        memory_mb: Address space of each process of the program, in MiB.

    Example:
        >>> response = "Sure:\n```python\ndef double(x):\n    return 2 * x\n```"
        >>> PythonTests()("Double it.", response, {"test": ["assert double(2) == 4"]})
        1.0
    """

    @checked()
    def __init__(
        self, time_limit: Positive = 5.0, memory_mb: Annotated[int, Bound(64), "Python itself takes that."] = 1024
    ) -> None:
        self.time_limit = time_limit
        self.memory_mb = memory_mb
        self.use_namespaces = True
        self._warned = False

    def __call__(self, prompt: str, response: str, row: dict[str, Any]) -> float:
        """Return 1 if the code in `response` passes the tests in `row`, else 0."""
        program, tests = assemble(response, row)
        token = secrets.token_hex()  # a program that prints, exits or dies does not come by it by chance
        request = {
            "program": program,
            "tests": tests,
            "entry_point": row.get("entry_point"),
            "token": token,
            "cpu_seconds": int(self.time_limit) + 1,
            "memory_bytes": self.memory_mb << 20,
            "use_namespaces": self.use_namespaces,
        }
        isolation, _, result = run(request, self.time_limit).partition("\n")
        if isolation == "guard" and not self._warned:
            self._warned = True
            log.warning(
                "No namespaces for unit tests on this machine: Python code that responses write cannot open sockets, "
                "but programs that it starts can use the network and may outlive it."
            )
        return float(token in result)


def extract_code(response: str, tests: str) -> str:
    """Return the last fenced block that defines a name of `tests`, else the last, else all."""
    blocks = [
        (language.lower(), re.sub(rf"^[ \t]{{0,{len(indent)}}}", "", code, flags=re.MULTILINE))
        for indent, language, code in FENCED_BLOCK.findall(response)
        if code.strip()
    ]
    marked = [code for language, code in blocks if language in ("python", "python3", "py")]
    codes = marked or [code for _, code in blocks] or [response]
    tested = set(re.findall(r"\w+", tests))
    defining = [code for code in codes if any(tested & set(names) for names in DEFINED.findall(code))]
    return (defining or codes)[-1]


def assemble(response: str, row: dict[str, Any]) -> tuple[str, str]:
    """Return program and tests; raise ValueError if the row lacks tests or `check`'s function."""
    tests = row.get("test")
    if isinstance(tests, (list, tuple)):
        tests = "\n".join(tests)
    if not isinstance(tests, str) or not tests.strip():
        raise ValueError(f"`PythonTests` needs a column `test` with a script or a list of asserts, got {tests!r}.")
    entry_point = row.get("entry_point")
    if entry_point is None:
        if re.search(r"^def check\(", tests, re.MULTILINE):
            raise ValueError("`test` defines `check(candidate)`, so the row needs `entry_point`, what to check.")
        return extract_code(response, tests), tests
    code = extract_code(response, entry_point)
    # A function that is only a signature and a docstring is complete; rewriting it after that replaces it.
    rewrites = re.search(rf"^(?:async\s+)?def\s+{re.escape(entry_point)}\b", code, re.MULTILINE)
    return row.get("prompt", "") + ("\n\n" if rewrites else "") + code, f"{tests}\n\ncheck({entry_point})\n"


def run(request: dict[str, Any], time_limit: float) -> str:
    """Return the runner's reply on program and tests; raise RuntimeError if the runner failed."""
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        tempfile.TemporaryFile("w+") as stdin,
        tempfile.TemporaryFile("w+") as stderr,
    ):
        json.dump(request, stdin)
        stdin.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-I", str(Path(__file__).with_name("_code_runner.py"))],
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=stderr,
            cwd=folder,
            env={"PATH": os.defpath, "HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        assert process.stdout is not None
        with process.stdout:
            ready = select.poll()
            ready.register(process.stdout, select.POLLIN)
            if ready.poll(1000 * START_LIMIT):  # the interpreter's start is not the program's time
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(time_limit)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            os.set_blocking(process.stdout.fileno(), False)  # a survivor may hold the other end open
            reply = (process.stdout.read() or b"").decode()
        stderr.seek(0)
        if not reply:
            raise RuntimeError(
                f"The runner of the unit tests did not come to the program within {START_LIMIT} s; it ended with code "
                f"{process.returncode} and wrote {stderr.read()[-1000:]!r}."
            )
        return reply
