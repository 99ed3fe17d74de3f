"""Unit tests as a reward: what passes, what must not pass, and what must not get away."""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from tlt_lightning.rewards import PythonTests
from tlt_lightning.rewards.code import extract_code

pytestmark = pytest.mark.slow

HUMAN_EVAL = {
    "prompt": 'import math\n\n\ndef area(radius: float) -> float:\n    """Area of a circle."""\n',
    "test": "def check(candidate):\n    assert abs(candidate(1) - 3.14159) < 1e-3\n    assert candidate(0) == 0\n",
    "entry_point": "area",
}
ASSERTS = {"test": ["assert double(2) == 4", "assert double('a') == 'aa'"]}
DOUBLE = "def double(x):\n    return x + x\n"


def fenced(code: str) -> str:
    return f"Let me think.\n```python\n{code}\n```\nDone."


def score(code: str, row: dict[str, Any] = ASSERTS, time_limit: float = 60.0, **settings: Any) -> float:
    reward = PythonTests(time_limit=time_limit, memory_mb=settings.pop("memory_mb", 1024))
    reward.use_namespaces = settings.pop("use_namespaces", True)
    return reward("", fenced(code), row)


def has_namespaces() -> bool:
    reward = PythonTests()
    reward("", DOUBLE, ASSERTS)
    return not reward._warned


@pytest.mark.parametrize(
    "response",
    [
        fenced("def area(radius):\n    return math.pi * radius**2"),
        fenced("from math import pi\n\ndef area(radius: float) -> float:\n    return pi * radius * radius"),
        "    return math.pi * radius**2\n",
        fenced("def area(radius):\n    return 0")
        + "\nBetter:\n"
        + fenced("def area(radius):\n    return math.pi * radius**2"),
        fenced("def area(radius):\n    return math.pi * radius**2") + "\nSo:\n" + fenced("print(area(2))"),
    ],
    ids=["whole function", "own imports", "continuation", "last block", "usage example"],
)
def test_correct_human_eval_solutions_pass(response: str) -> None:
    assert PythonTests()("", response, HUMAN_EVAL) == 1.0


def test_wrong_human_eval_solution_fails() -> None:
    assert score("def area(radius):\n    return 3 * radius", HUMAN_EVAL) == 0.0
    assert score("def circumference(radius):\n    return 3 * radius", HUMAN_EVAL) == 0.0


@pytest.mark.parametrize(
    "trick",
    [
        "def abs(number):\n    return 0\n",
        "import builtins\nbuiltins.abs = lambda number: 0\n",
        "abs = lambda number: 0\n",
    ],
)
def test_a_program_s_own_builtins_are_not_those_of_its_check(trick: str) -> None:
    assert score(trick + "def area(radius):\n    return 3 * radius**2", HUMAN_EVAL) == 0.0
    assert score(trick + "def area(radius):\n    return math.pi * radius**2 + abs(5)", HUMAN_EVAL) == 1.0
    named = {"test": "def check(candidate):\n    assert candidate(2) == 0", "entry_point": "abs"}
    assert score(trick + "def double(x):\n    return x + x", named) == float("builtins" not in trick)
    assert score("def sum(a, b):\n    return a * b", {"test": "assert sum(2, 3) == 6"}) == 1.0


@pytest.mark.parametrize(
    "code",
    [
        "class Any:\n    def __eq__(self, other):\n        return True\n\ndef double(x):\n    return Any()\n",
        "def double(x):\n    return type('Any', (str,), {'__eq__': lambda self, other: True})()\n",
    ],
)
def test_what_equals_anything_does_not_pass(code: str) -> None:
    assert score(code) == 0.0


@pytest.mark.parametrize("equal", ["type(self) is type(other)", "self.value == other.value", "NotImplemented"])
def test_a_program_s_classes_may_have_their_own_equality(equal: str) -> None:
    assert score(f"class Own:\n    def __eq__(self, other):\n        return {equal}\n\n{DOUBLE}") == 1.0


def test_lists_and_scripts_of_asserts() -> None:
    assert score(DOUBLE) == 1.0
    assert score(DOUBLE, {"test": "assert double(1) == 2"}) == 1.0
    assert score(DOUBLE, {"test": ["assert double(1) == 2", "assert double(1) == 3"]}) == 0.0


@pytest.mark.parametrize("use_namespaces", [True, False])
@pytest.mark.parametrize(
    "code",
    [
        "from dataclasses import dataclass\n\n@dataclass\nclass Twice:\n    value: int = 2\n",
        "import pickle\nclass Twice:\n    value = 2\nTwice = type(pickle.loads(pickle.dumps(Twice())))\n",
        "from typing import NamedTuple\nclass Twice(NamedTuple):\n    value: int = 2\n",
        "import sys\nTwice = sys.modules[__name__].__dict__.setdefault('x', type('Twice', (), {'value': 2}))\n",
    ],
    ids=["dataclass", "pickle", "typing", "own module"],
)
def test_programs_find_their_own_module(code: str, use_namespaces: bool) -> None:
    assert score(code, {"test": "assert Twice().value == 2"}, use_namespaces=use_namespaces) == 1.0


def test_an_annotation_without_its_import_fails_as_in_python() -> None:
    assert score("def double(x: List[int]):\n    return x + x") == 0.0


def test_the_start_of_the_interpreter_does_not_count(monkeypatch, tmp_path: Path) -> None:
    slow = tmp_path / "python"
    slow.write_text(f'#!/bin/sh\nsleep 2.2\nexec {sys.executable} "$@"\n')
    slow.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(slow))
    assert score(DOUBLE, time_limit=2.0) == 1.0


@pytest.mark.parametrize("use_namespaces", [True, False])
def test_a_program_that_leaves_its_group_does_not_survive(tmp_path: Path, use_namespaces: bool) -> None:
    held = tmp_path / "held"
    code = (
        "import fcntl, os, time\ntry: os.setsid()\nexcept OSError: pass\n"
        f"file = open({str(held)!r}, 'w')\nfcntl.flock(file, fcntl.LOCK_EX)\ntime.sleep(20)\nfile.write('alive')\n"
    )
    assert score(code + DOUBLE, time_limit=1.0, use_namespaces=use_namespaces) == 0.0
    with held.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # its end gives it back
    assert held.read_text() == ""


@pytest.mark.parametrize(
    "code",
    [
        "def double(x:",
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "exit()",
        "raise SystemExit",
        "print('0' * 64); raise KeyboardInterrupt",
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
        "import ctypes; ctypes.string_at(0)",
        "",
    ],
)
def test_ending_before_the_tests_does_not_pass(code: str) -> None:
    assert score(code, {"test": "assert True\nassert double"}) == 0.0


def test_an_infinite_loop_ends_at_the_time_limit() -> None:
    assert score(DOUBLE + "while True: pass", time_limit=0.7) == 0.0


@pytest.mark.parametrize("use_namespaces", [True, False])
def test_a_memory_hog_fails_alone(use_namespaces: bool) -> None:
    hog = "try:\n  hoard = bytearray(320 << 20)\nexcept MemoryError: pass\nelse: 1 / 0\n"
    assert score(hog + DOUBLE, memory_mb=256, use_namespaces=use_namespaces) == 1.0
    assert score("hoard = bytearray(320 << 20)\n" + DOUBLE, memory_mb=256, use_namespaces=use_namespaces) == 0.0
    assert score("hoard = bytearray(64 << 20)\n" + DOUBLE, memory_mb=256, use_namespaces=use_namespaces) == 1.0


def test_an_endless_file_meets_a_limit() -> None:
    write = "for _ in range(100): file.write(bytes(1 << 20))"
    code = f"try:\n  with open('big', 'wb') as file:\n    {write}\nexcept OSError: pass\nelse: 1 / 0\n"
    assert score(code + DOUBLE) == 1.0


def fork_and_survive(marker: Path, leave_group: bool) -> str:
    """A program whose forked child waits until the tests are long over, then writes to a file that it has locked."""
    return f"""
import fcntl, os, time
ready, wake = os.pipe()
if os.fork() == 0:
    {"os.setsid()" if leave_group else "pass"}
    file = open({str(marker)!r}, "w")
    fcntl.flock(file, fcntl.LOCK_EX)
    os.write(wake, b".")
    time.sleep(20)
    file.write("alive")
    file.flush()
    os._exit(0)
os.read(ready, 1)
{DOUBLE}"""


@pytest.mark.parametrize("leave_group", [False, True])
@pytest.mark.parametrize("use_namespaces", [True, False])
def test_a_forked_child_neither_delays_nor_survives(tmp_path: Path, leave_group: bool, use_namespaces: bool) -> None:
    marker = tmp_path / "alive"
    assert score(fork_and_survive(marker, leave_group), use_namespaces=use_namespaces) == 1.0
    assert marker.read_text() == ""  # the child was not waited for
    if leave_group and not (use_namespaces and has_namespaces()):
        return  # only a process namespace ends a child that leaves its process group
    with marker.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # the child's end gives it back
    assert marker.read_text() == ""


def test_namespaces_are_used_where_the_kernel_has_them() -> None:
    command = ["unshare", "--user", "--pid", "--net", "--fork", "true"]
    if shutil.which("unshare") is None or subprocess.run(command, capture_output=True, timeout=30).returncode:
        pytest.skip("no namespaces on this machine")
    assert has_namespaces()


@pytest.mark.parametrize("use_namespaces", [True, False])
def test_the_network_is_out_of_reach(use_namespaces: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        connect = f"import socket\nsocket.create_connection(('127.0.0.1', {server.getsockname()[1]}), 1)\n"
        exec(connect)
        assert score(connect + DOUBLE, use_namespaces=use_namespaces) == 0.0
        caught = "try:\n  " + connect.replace("\n", ";").strip(";") + "\nexcept OSError: pass\nelse: 1 / 0\n"
        assert score(caught + DOUBLE, use_namespaces=use_namespaces) == 1.0


@pytest.mark.parametrize("use_namespaces", [True, False])
def test_ordinary_programs_work(use_namespaces: bool) -> None:
    code = """
import asyncio, subprocess, sys, tempfile, threading, multiprocessing
asyncio.run(asyncio.sleep(0))
open("notes.txt", "w").write("x")
with tempfile.TemporaryDirectory() as folder: pass
thread = threading.Thread(target=print); thread.start(); thread.join()
assert subprocess.run([sys.executable, "-c", "print(1)"], capture_output=True, text=True).stdout == "1\\n"
assert input is not None and sys.stdin.read() == ""
print("x" * 10_000_000)
"""
    assert score(code + DOUBLE, use_namespaces=use_namespaces) == 1.0


def test_the_program_sees_no_environment_and_leaves_no_files(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "secret")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    code = "import os\nassert 'SECRET_TOKEN' not in os.environ and not os.listdir()\nopen('left', 'w').close()\n"
    assert score(code + DOUBLE) == 1.0
    assert os.listdir(tmp_path) == []


def test_missing_namespaces_are_said_once(caplog) -> None:
    reward = PythonTests()
    reward.use_namespaces = False
    assert [reward("", fenced(DOUBLE), ASSERTS) for _ in range(2)] == [1.0, 1.0]
    assert caplog.text.count("No namespaces for unit tests") == 1


def test_it_works_in_threads() -> None:
    scores: list[float] = []
    threads = [threading.Thread(target=lambda: scores.append(score(DOUBLE))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert scores == [1.0] * 4


def test_a_runner_that_cannot_start_is_an_error(monkeypatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match="did not come to the program"):
        score(DOUBLE)


@pytest.mark.parametrize(
    ("row", "match"),
    [
        ({}, "`PythonTests` needs a column `test`"),
        ({"test": []}, "`PythonTests` needs a column `test`"),
        ({"test": HUMAN_EVAL["test"]}, "the row needs `entry_point`"),
    ],
)
def test_rows_without_tests_are_an_error(row: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        score(DOUBLE, row)


@pytest.mark.parametrize(
    ("response", "code"),
    [
        ("```python\na\n```", "a\n"),
        ("```py\na\n```\n```Python\nb\n```", "b\n"),
        ("```python\na\n```\nIt prints\n```\nb\n```", "a\n"),
        ("```\na\n```\n```\nb\n```", "b\n"),
        ("no fence", "no fence"),
        ("```python\nunfinished", "unfinished"),
        ("1. Write:\n   ```python\n   if a:\n       b\n   ```\n", "if a:\n    b\n"),
        ("1. ```python\n   if a:\n       b\n   ```\n", "if a:\n    b\n"),
        ("```python\n    body\n```", "    body\n"),
        ("```python\nclass Stack: ...\n```\n```python\nshow(Stack())\n```", "class Stack: ...\n"),
        ("```python\na\n```\n```", "a\n"),
    ],
)
def test_the_last_fenced_block_with_what_is_tested_is_the_code(response: str, code: str) -> None:
    assert extract_code(response, tests="assert Stack()") == code


def test_a_file_holds_64_mib_and_no_byte_more() -> None:
    code = "with open('big', 'wb') as file: file.truncate(%d)\n"
    assert score(code % (64 << 20) + DOUBLE) == 1.0
    assert score(code % ((64 << 20) + 1) + DOUBLE) == 0.0
