"""Run one program and its tests under limits, in a process that `code.py` starts.

A script, without the package. It reads a request as JSON from standard input, and writes how it is isolated
("namespaces" or "guard"), then the request's token once the tests have passed.
"""

import builtins
import ctypes
import json
import os
import resource
import signal
import socket
import sys
import types
from collections.abc import Iterator
from typing import Any

MAX_FILE_BYTES = 64 << 20
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000  # linux/sched.h; in os from Python 3.12
PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main() -> None:
    """Run the program, then its tests; write the token if they pass."""
    request = json.load(sys.stdin)
    isolated = request["use_namespaces"] and enter_namespaces()
    if not isolated:
        sys.addaudithook(refuse_network)
    limit_resources(request["cpu_seconds"], request["memory_bytes"])
    reply = os.dup(1)
    os.write(reply, b"namespaces\n" if isolated else b"guard\n")
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    program = sys.modules["program"] = types.ModuleType("program")  # where dataclasses and pickle look names up
    known, entry_point, names = {**vars(builtins)}, request["entry_point"], program.__dict__
    exec(compile(request["program"], "program.py", "exec"), names)
    if entry_point is not None:  # else a test may be of the program's own `sum`
        own = {name: value for name, value in names.items() if name in ("__name__", entry_point) or name not in known}
        names = {**own, "__builtins__": known}
    exec(compile(request["tests"], "tests.py", "exec"), names)
    if any(map(equals_anything, subclasses(object))):  # whose objects pass each test that compares
        os._exit(0)
    os.write(reply, request["token"].encode())
    os._exit(0)  # threads and exit handlers of the program have no say any more


def subclasses(kind: type) -> Iterator[type]:
    """Yield all classes below one, some of them twice."""
    each: type
    for each in type.__subclasses__(kind):
        yield each
        yield from subclasses(each)


def equals_anything(kind: type) -> bool:
    """Return True if a class has an `__eq__` of the program's that asks nothing of its object."""
    equal: Any = vars(kind).get("__eq__")
    try:
        return equal.__code__.co_filename == "program.py" and equal(None, object()) is True
    except Exception:  # it has none of the program's, or looks at its object
        return False


def enter_namespaces() -> bool:
    """Move to new process and network namespaces; False where the kernel does not allow it.

    The caller returns as the namespace's first process, with whose end the kernel kills all others in it.
    """
    try:
        libc = ctypes.CDLL(None)
        unshare, prctl = libc.unshare, libc.prctl
    except (AttributeError, OSError):  # not Linux
        return False
    if unshare(CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNET) != 0:
        return False
    if child := os.fork():
        os.waitpid(child, 0)
        os._exit(0)
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # killing the process group misses a program that has left it
    return True


def refuse_network(event: str, args: tuple[Any, ...]) -> None:
    """Raise when the interpreter is about to use the network; an audit hook."""
    local = event == "socket.__new__" and args[1] == socket.AF_UNIX  # event loops talk to themselves
    if event in ("socket.__new__", "socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr") and not local:
        raise PermissionError("unit tests may not use the network")


def limit_resources(cpu_seconds: int, memory_bytes: int) -> None:
    """Limit this process and all that it starts."""
    for kind, limit in (
        (resource.RLIMIT_CPU, cpu_seconds),
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_FSIZE, MAX_FILE_BYTES),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (limit, limit))


if __name__ == "__main__":
    main()
