"""Answer by a script's function, in forks of this process, which has loaded what the function needs.

A script, without the package. Its argument is the script's path, its standard input a socket that brings a connection
for every fork. A fork cannot write files, start programs or use the network, as far as the interpreter's audit events
tell of it; where the kernel allows namespaces, no network is in reach, and nothing outlives the process that loaded.
It can read files and forge its own answer.
"""

import gc
import json
import logging
import os
import resource
import runpy
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from types import CodeType
from typing import Any

MAX_MEMORY = 4 << 30

REFUSED = ("ctypes.", "os.", "socket.", "subprocess.")
"""Beginnings of audit events that no answer has use for."""

ALLOWED = ("os.listdir", "os.scandir")
"""Events that imports raise."""

PLAIN = frozenset({"Add", "Float", "Integer", "Mul", "Pow", "Symbol", "sympy"})
"""Names in text that SymPy makes of arithmetic, and in what it runs itself."""

is_spent = False
"""True once a text was run as Python that may have changed what the next one finds."""


def main() -> None:
    """Load, then fork for each connection until standard input closes."""
    runpy.run_path(str(Path(__file__).with_name("_code_runner.py")))["enter_namespaces"]()
    logging.disable()  # math-verify warns that its own time limit, which huge integers ignore, is off
    answer = runpy.run_path(sys.argv[1])["answer"]
    for kind, limit in ((resource.RLIMIT_AS, MAX_MEMORY), (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_CORE, 0)):
        resource.setrlimit(kind, (limit, limit))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    gc.freeze()
    with socket.socket(fileno=0) as forks:
        while connections := socket.recv_fds(forks, 1, 1)[1]:
            if os.fork() == 0:
                forks.close()
                serve(Connection(connections[0]), answer)
                os._exit(0)
            os.close(connections[0])


def serve(asked: Connection, answer: Callable[..., Any]) -> None:
    """Answer until the other end closes."""
    sys.addaudithook(watch)
    asked.send_bytes(b"ready")
    with suppress(EOFError):
        while True:
            time_limit, *arguments = asked.recv()
            # Left at its default action: the kernel ends the process even while arithmetic holds the interpreter.
            signal.setitimer(signal.ITIMER_REAL, time_limit)
            try:
                value, error = answer(*arguments), ""
            except BaseException as raised:
                value, error = None, f"{type(raised).__name__}: {raised}"
            signal.setitimer(signal.ITIMER_REAL, 0)
            asked.send_bytes(json.dumps((value, error, is_spent)).encode())


def watch(event: str, args: tuple[Any, ...]) -> None:
    """Refuse what an answer has no use for, and see which text is run; an audit hook."""
    global is_spent
    writes = event == "open" and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    if writes or (event.startswith(REFUSED) and event not in ALLOWED):
        raise PermissionError(f"an answer may not use {event}")
    if event == "exec" and args[0].co_filename == "<string>":
        is_plain = PLAIN.issuperset(args[0].co_names) and not any(isinstance(c, CodeType) for c in args[0].co_consts)
        is_spent |= not is_plain


if __name__ == "__main__":
    main()
