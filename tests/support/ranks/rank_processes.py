"""Ranks of a data-parallel run, started together as a cluster's launcher does.

They are forked from a process that has imported everything once. By Lightning's own launcher each rank would import it
anew, one after the other: on two cores half of what such a run takes. `test_two_ranks.py` has runs that go through it.
"""

import importlib
import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

CONTEXT = multiprocessing.get_context("forkserver")
ROOT = Path(__file__).parents[3]


@dataclass(frozen=True)
class Ended:
    """How the ranks ended.

    Args:
        statuses: Exit statuses, rank zero's first; negative where a signal ended it.
        stderr: What they wrote to it, rank zero's first.
    """

    statuses: list[int | None]
    stderr: str


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def with_root(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which Python finds this repository first, and then all that it found before."""
    paths = [str(ROOT / "tests/support/start"), str(ROOT), *environment.get("PYTHONPATH", "").split(os.pathsep)]
    return {**environment, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def spawned(rank: int, port: int) -> dict[str, str]:
    """Return the environment of a rank as Lightning's own launcher sets it."""
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_RANK": str(rank)}


def run_ranks(
    script: str,
    out: Path,
    *arguments: str,
    num_ranks: int = 2,
    timeout: float = 280,
    launcher: Callable[[int, int], dict[str, str]] = spawned,
) -> Ended:
    """Run `main` of a script of the tests as rank 0 and as rank 1, until both have ended.

    Args:
        script: Module, for instance `tests.support.ranks.two_ranks`.
        out: Where what they print is kept.
        arguments: Of `main`.
        num_ranks: 1 runs it in one process.
        timeout: Seconds after which both are killed.
        launcher: Returns the environment of a rank, of its number and a free port.
    """
    port = free_port()
    places = [launcher(rank, port) for rank in range(num_ranks)]
    ranks = [
        CONTEXT.Process(target=be_rank, args=(rank, place, script, out, arguments)) for rank, place in enumerate(places)
    ]
    end = time.monotonic() + timeout
    try:
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(max(0.0, end - time.monotonic()))
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()
    stderr = [(out / f"stderr{rank}").read_text(errors="replace") for rank in range(num_ranks)]
    return Ended([rank.exitcode for rank in ranks], "".join(stderr))


def be_rank(rank: int, place: dict[str, str], script: str, out: Path, arguments: tuple[str, ...]) -> None:
    """What a rank's process does."""
    for stream, name in ((sys.stdout, "stdout"), (sys.stderr, "stderr")):
        os.dup2(os.open(out / f"{name}{rank}", os.O_WRONLY | os.O_CREAT), stream.fileno())
    os.environ |= place
    importlib.import_module(script).main(*arguments)
