"""Functions that are asked in child processes: what they answer, and what they cannot do to this process."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tlt_lightning.rewards import children
from tlt_lightning.rewards.children import Children

SCRIPT = """
import os, time
loaded = os.getpid()

def answer(text):
    return eval(text)
"""


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Children]:
    def made(text: str = SCRIPT) -> Children:
        script = tmp_path / "script.py"
        script.write_text(text)
        return Children(script)

    return made


def test_a_child_is_asked_again_and_forked_from_what_was_loaded_once(make) -> None:
    asked = make()
    assert [asked.ask(text) for text in ("1 + 1", "[[1], [2]]", "'a' * 3")] == [2, [[1], [2]], "aaa"]
    (child,) = asked.idle
    assert asked.ask("loaded") == asked.ask("loaded") > 0
    assert child not in asked.idle


@pytest.mark.parametrize(
    "text", ["globals().update(loaded=7) or 1", "[c.update(loaded=7) for c in [globals()]] and 1", "().__class__ and 1"]
)
def test_a_child_that_ran_more_than_arithmetic_is_not_asked_again(make, text: str) -> None:
    asked = make()
    assert asked.ask(text) == 1
    assert not asked.idle
    assert asked.ask("loaded") != 7


def test_many_threads_ask_at_once(make) -> None:
    asked = make()
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(asked.ask, [f"{n} + {n}" for n in range(64)])) == [2 * n for n in range(64)]
    assert 1 <= len(asked.idle) <= 4


@pytest.mark.parametrize("text", ["9**9**9", "time.sleep(100)"])
def test_a_late_answer_is_an_error_and_its_child_is_replaced(make, monkeypatch, text: str) -> None:
    asked = make()
    monkeypatch.setattr(children, "TIME_LIMIT", 0.5)
    with pytest.raises(TimeoutError, match=r"No answer within 0\.5 s"):
        asked.ask(text)
    monkeypatch.setattr(children, "TIME_LIMIT", 60)
    assert asked.ask("1 + 1") == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1/0", "ZeroDivisionError: division by zero"),
        ("exit()", "SystemExit"),
        ("os._exit(0)", "The child process ended"),
        ("bytes(1 << 33)", "MemoryError"),
    ],
)
def test_what_fails_is_an_error_and_the_next_is_answered(make, text: str, message: str) -> None:
    asked = make()
    with pytest.raises(RuntimeError, match=message):
        asked.ask(text)
    assert asked.ask("1 + 1") == 2


@pytest.mark.parametrize("text", ["1/0", "os._exit(0)", "time.sleep(9)"])
def test_an_error_that_is_kept_keeps_no_child(make, monkeypatch, text: str) -> None:
    asked = make()
    asked.ask("1")
    (child,) = asked.idle
    monkeypatch.setattr(children, "TIME_LIMIT", 0.5)
    with pytest.raises((RuntimeError, TimeoutError)):
        asked.ask(text)
    assert child.closed


def test_a_child_that_was_killed_while_idle_is_an_error_once(make) -> None:
    asked = make()
    asked.ask("1")
    asked._loaded.kill()
    asked._loaded.wait()
    assert asked.idle[0].poll(100)
    with pytest.raises(RuntimeError, match="The child process ended"):
        asked.ask("1")
    assert asked.ask("1 + 1") == 2


def test_a_child_writes_no_files_starts_no_programs_and_has_no_network_nor_secrets(make, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "secret")
    asked, here = make(), str(tmp_path / "here")
    with socket.create_server(("127.0.0.1", 0)) as server:
        for text in (
            f"open({here!r}, 'w')",
            f"os.open({here!r}, os.O_CREAT)",
            f"os.remove({str(tmp_path / 'script.py')!r})",
            f"os.system('touch {here}')",
            f"__import__('subprocess').run(['touch', {here!r}])",
            f"__import__('socket').create_connection(('127.0.0.1', {server.getsockname()[1]}))",
        ):
            with pytest.raises(RuntimeError, match="PermissionError: an answer may not use"):
                asked.ask(text)
    assert os.listdir(tmp_path) == ["script.py"]
    assert asked.ask("'SECRET_TOKEN' in os.environ") is False


def test_an_interruption_from_the_keyboard_is_not_for_children(make) -> None:
    asked = make()
    asked.load()
    assert os.getpgid(asked._loaded.pid) == asked._loaded.pid


def test_a_script_that_does_not_run_is_an_error_which_the_terminal_explains(make, capfd) -> None:
    with pytest.raises(RuntimeError, match="was not ready"):
        make("import no_such_package").ask()
    assert "No module named 'no_such_package'" in capfd.readouterr().err


def test_children_end_with_their_parent(make, tmp_path) -> None:
    make()
    code = (
        "from pathlib import Path\nfrom tlt_lightning.rewards.children import Children\n"
        f"asked = Children(Path({str(tmp_path / 'script.py')!r}))\nasked.ask('1')\nprint(asked._loaded.pid)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=250, check=True)
    assert done.stderr == ""
    for _ in range(2000):
        try:
            os.kill(int(done.stdout), 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    pytest.fail("the child outlived its parent by 100 s")
