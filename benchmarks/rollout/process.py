"""Keep engines in processes of their own: several live on one device and take turns."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Iterable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.rollout.setup import Setup

START_SECONDS, CALL_SECONDS = 300.0, 240.0

Table = list[list[int]]


class EngineError(Exception):
    """Says how an engine failed."""


def serve(pipe: Connection, setup: Setup, kind: str, table: Table) -> None:
    """Answer calls of one `Bench` until told to close: the process of one engine."""
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
    """Starts and calls one engine's process. Starting returns at once; `ready` waits.

    `table` is vLLM's table of draft lengths, for the engine that takes one.
    """

    def __init__(self, setup: Setup, kind: str, table: Table) -> None:
        context = multiprocessing.get_context("spawn")
        self.kind = kind
        self._pipe, far = context.Pipe()
        self._process = context.Process(target=serve, args=(far, setup, kind, table), name=kind)
        self._process.start()
        far.close()
        self._description: dict[str, Any] = {}
        self._error = ""

    def ready(self) -> dict[str, Any]:
        """Wait for the engine and return its description; raise EngineError if it is dead."""
        if not self._description and not self._error:
            self._description = self._answer(START_SECONDS)
        if self._error:
            raise EngineError(self._error)
        return self._description

    def call(self, name: str, **arguments: Any) -> Any:
        """Call a method of its `Bench`; raise EngineError if it fails or is late to answer."""
        self.ready()
        try:
            self._pipe.send((name, arguments))
        except OSError:
            self._die(f"The {self.kind} engine is gone.")
        return self._answer(CALL_SECONDS)

    def _answer(self, seconds: float) -> Any:
        if not self._pipe.poll(seconds):
            self._die(f"The {self.kind} engine did not answer within {seconds:.0f} s.")
        try:
            state, answer = self._pipe.recv()
        except EOFError:
            self._die(f"The {self.kind} engine's process has ended.")
        if state == "failed":
            if not self._description or "cuda" in answer.lower():
                self._die(answer)  # a device error stays: every later call of the process would fail too
            raise EngineError(answer)
        return answer

    def _die(self, why: str) -> None:
        self._error = why
        self._process.kill()
        self._process.join(10)
        raise EngineError(why)

    def close(self) -> None:
        """End the process in order, or at once if it does not."""
        try:
            self._pipe.send(None)
            self._process.join(20)
        except OSError:
            pass
        self._process.kill()


class Engines:
    """Holds the engines that are needed now; a failed one stays dead until it is needed anew."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.table: Table = []
        self.descriptions: dict[str, dict[str, Any]] = {}
        self._live: dict[str, EngineProcess] = {}

    def need(self, kinds: Iterable[str]) -> None:
        """Start missing engines together, close the others, wait, and warm each up by itself: starts disturb timing."""
        kinds = list(kinds)
        missing = [kind for kind in kinds if kind not in self._live]
        for kind in [kind for kind in self._live if kind not in kinds]:
            self._live.pop(kind).close()
        for kind in missing:
            self._live[kind] = EngineProcess(self.setup, kind, self.table)
        for kind in kinds:
            try:
                self.descriptions[kind] = self._live[kind].ready()
            except EngineError as error:
                print(f"The {kind} engine did not start:\n{error}", flush=True)
        for kind in missing:
            with suppress(EngineError):  # which its calls raise
                self._live[kind].call("warm_up")

    def get(self, kind: str) -> EngineProcess:
        """Return a live engine; its calls raise EngineError if it failed."""
        return self._live[kind]

    def close(self) -> None:
        """End all of them."""
        self.need(())
