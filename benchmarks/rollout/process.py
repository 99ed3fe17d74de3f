"""Engines in processes of their own: several live on one device and take turns, and one that dies is replaced."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Iterable
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.rollout.setup import Setup

START_SECONDS = 300.0


class EngineError(Exception):
    """An engine failed; says how."""


def serve(pipe: Connection, setup: Setup, kind: str, table: list[list[int]]) -> None:
    """The process of one engine: answers calls of its `Bench` until told to close."""
    try:
        from benchmarks.rollout.bench import Bench  # imports vLLM

        bench = Bench(setup, kind, table)
        pipe.send(("done", bench.describe()))
    except BaseException:
        pipe.send(("failed", traceback.format_exc(limit=-6)))
        raise
    while (call := pipe.recv()) is not None:
        name, arguments = call
        try:
            pipe.send(("done", getattr(bench, name)(**arguments)))
        except Exception:
            pipe.send(("failed", traceback.format_exc(limit=-6)))
    bench.close()


class EngineProcess:
    """The near end of one engine's process. Starting returns at once; `ready` waits.

    Args:
        setup: What is rolled out.
        kind: Which engine.
        table: vLLM's table of draft lengths, for the engine that takes one.
    """

    def __init__(self, setup: Setup, kind: str, table: list[list[int]]) -> None:
        context = multiprocessing.get_context("spawn")
        self.kind = kind
        self._pipe, far = context.Pipe()
        self._process = context.Process(target=serve, args=(far, setup, kind, table), name=kind)
        self._process.start()
        far.close()
        self._description: dict[str, Any] | None = None
        self._error: EngineError | None = None
        self.started_alone = True

    def ready(self) -> dict[str, Any]:
        """What the engine says of itself once it is there; raises EngineError if it never is."""
        if self._error is not None:
            raise self._error
        if self._description is None:
            try:
                self._description = self._answer(START_SECONDS)
            except EngineError as error:
                self._error = error
                raise
        return self._description

    def call(self, name: str, seconds: float, **arguments: Any) -> Any:
        """Call a method of its `Bench`; raises EngineError if it fails or does not answer within `seconds`."""
        try:
            self._pipe.send((name, arguments))
        except OSError as error:
            raise EngineError(f"The {self.kind} engine is gone.") from error
        return self._answer(seconds)

    def _answer(self, seconds: float) -> Any:
        if not self._pipe.poll(seconds):
            self.kill()
            raise EngineError(f"The {self.kind} engine did not answer within {seconds:.0f} s.")
        try:
            state, answer = self._pipe.recv()
        except EOFError as error:
            raise EngineError(f"The {self.kind} engine's process ended ({self._process.exitcode}).") from error
        if state == "failed":
            if "cuda" in answer.lower():
                self.kill()  # a device error stays: every later call of the process would fail too
            raise EngineError(answer)
        return answer

    @property
    def is_ready(self) -> bool:
        """True once `ready` has returned."""
        return self._description is not None

    @property
    def is_alive(self) -> bool:
        """False once its process has ended."""
        return self._process.is_alive()

    def kill(self) -> None:
        """End the process now."""
        self._process.kill()
        self._process.join(10)

    def close(self) -> None:
        """End the process in order, or at once if it does not."""
        try:
            self._pipe.send(None)
            self._process.join(20)
        except OSError:
            pass
        if self.is_alive:
            self.kill()


class Engines:
    """The engines that are needed now; one that failed is started once more, and not after that.

    Args:
        setup: What is rolled out.
    """

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.table: list[list[int]] = []
        self.descriptions: dict[str, dict[str, Any]] = {}
        self._live: dict[str, EngineProcess] = {}
        self._failures: dict[str, int] = {}

    def need(self, kinds: Iterable[str], later: Iterable[str] = (), wait: bool = True) -> None:
        """Start those that are missing, together, close those that will not be needed either, and wait.

        Args:
            kinds: What is needed now.
            later: What will be; it is kept if it lives.
            wait: Until all have started: nothing can be timed before. False returns at once.
        """
        kinds, later = list(kinds), list(later)
        for kind in [kind for kind in self._live if kind not in (*kinds, *later)]:
            self._live.pop(kind).close()
        for kind in kinds:
            if kind not in self._live and self._failures.get(kind, 0) < 2:
                self._start(kind)
        if wait:
            self._wait()

    def get(self, kind: str) -> EngineProcess:
        """A live engine; raises EngineError if there is none and trying again, with nothing else going on, fails."""
        while True:
            if kind in self._live and not self._live[kind].is_alive:
                self._fail(kind)
            if kind not in self._live:
                self._start(kind)
            try:
                found = self._live[kind].ready()
                if not self._live[kind].started_alone:  # memory is read of the whole device, the other's included
                    found = {name: value for name, value in found.items() if name not in ("graph_mib", "graph_table")}
                self.descriptions[kind] = found
                return self._live[kind]
            except EngineError as error:
                print(f"The {kind} engine did not start:\n{error}", flush=True)
                self._fail(kind)
                self._wait()

    def _fail(self, kind: str) -> None:
        self._live.pop(kind).kill()
        self._failures[kind] = self._failures.get(kind, 0) + 1

    def _start(self, kind: str) -> None:
        if self._failures.get(kind, 0) >= 2:
            raise EngineError(f"The {kind} engine failed twice and is not started again.")
        beside = [process for process in self._live.values() if not process.is_ready]
        self._live[kind] = EngineProcess(self.setup, kind, self.table if kind == "table" else [])
        for process in (*beside, self._live[kind]) if beside else ():
            process.started_alone = False

    def _wait(self) -> None:
        """Let the engines that are starting finish, however it ends."""
        for process in self._live.values():
            try:
                process.ready()
            except EngineError:
                continue  # `get` will find it dead

    def close(self) -> None:
        """End all of them."""
        self.need(())
