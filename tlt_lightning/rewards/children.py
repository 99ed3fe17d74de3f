"""Ask functions in child processes: they may compute without end, or run as Python what they are given.

One process loads what a function needs. Every child is its fork, so that a new one costs little.
"""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

TIME_LIMIT = 5.0
"""Seconds for one answer."""

START_LIMIT = 60.0
"""Seconds in which a child must be ready, on a loaded machine too."""

ENVIRONMENT = ("HOME", "LD_LIBRARY_PATH", "PATH", "PYTHONPATH")
"""Variables that children see."""


class Children:
    """Asks the function `answer` of a script, in as many children as there are threads that ask at once.

    A child that is late kills itself, and one that ran text which is more than arithmetic is not asked again. What
    children cannot do stands in `_child.py`.

    Args:
        script: Its path. It runs without the package.
    """

    def __init__(self, script: Path) -> None:
        # -P: the script's own folder may hold a math.py, which must not come first on the child's path.
        self.command = [sys.executable, "-P", "-W", "ignore", str(Path(__file__).with_name("_child.py")), str(script)]
        self.idle: deque[Connection] = deque()
        self._starting = threading.Lock()
        self._loaded: subprocess.Popen[bytes] | None = None

    def load(self) -> None:
        """Begin to load, without waiting for the end of it. When this process ends, all children do."""
        with self._starting:
            if self._loaded is None or self._loaded.poll() is not None:
                self._forks, theirs = socket.socketpair()
                kept = {name: value for name, value in os.environ.items() if name in ENVIRONMENT}
                with theirs:
                    self._loaded = subprocess.Popen(
                        self.command,
                        stdin=theirs.fileno(),
                        stdout=subprocess.DEVNULL,
                        env={**kept, "OMP_NUM_THREADS": "1"},
                        process_group=0,  # Ctrl-C is not for it
                    )

    def ask(self, *arguments: Any) -> Any:
        """Return what `answer` returns.

        Raises:
            TimeoutError: It took longer than `TIME_LIMIT`.
            RuntimeError: It failed, or its child ended.
        """
        try:
            child = self.idle.pop()
        except IndexError:
            child = self._fork()
        started, reply = time.monotonic(), None
        with suppress(EOFError, OSError):  # of a child that is no more
            child.send((TIME_LIMIT, *arguments))
            if child.poll(2 * TIME_LIMIT):
                reply = child.recv_bytes()
        is_late = reply is None and time.monotonic() - started >= TIME_LIMIT
        value, error, is_spent = json.loads(reply or '[null, "The child process ended.", false]')
        if error or is_spent:
            child.close()  # by which it ends; an error that is kept would keep it
        else:
            self.idle.append(child)
        if error:
            raise TimeoutError(f"No answer within {TIME_LIMIT} s.") if is_late else RuntimeError(error)
        return value

    def _fork(self) -> Connection:
        self.load()
        child, theirs = Pipe()
        with theirs:
            socket.send_fds(self._forks, [b"."], [theirs.fileno()])
        with suppress(EOFError):
            if child.poll(START_LIMIT) and child.recv_bytes():
                return child
        raise RuntimeError(f"{' '.join(self.command)} was not ready within {START_LIMIT} s, or ended, see above.")
