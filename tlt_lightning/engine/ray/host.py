"""Host an engine in a process of its own: step it in a thread, carry out commands between two steps."""

import os
import socket
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any, Literal

from ray import cloudpickle

from tlt_lightning.engine.base import RolloutEngine, RolloutProgress
from tlt_lightning.engine.ray.cluster import check_versions
from tlt_lightning.engine.ray.snapshot import Snapshot
from tlt_lightning.engine.ray.stages import StageClock
from tlt_lightning.engine.ray.team import OWN_SECONDS, LedEngine, enter, forget_rank
from tlt_lightning.rollout import Request, Response, Sampling

Command = Callable[["EngineHost"], bool]
"""Does something with a host between two engine steps; False if it must wait until what is being written has ended."""

Kind = Literal["weights", "drafter"]
"""Names what a snapshot holds."""


@dataclass(frozen=True)
class Report:
    """Says what a host has done since its last report.

    Args:
        rollout: Number of the rollout that it writes.
        responses: Those of this rollout that have ended.
        progress: How far this rollout is on this host.
        num_done: Commands that it has carried out.
        is_at_rest: True if it writes nothing.
        num_steps: Engine steps of this rollout.
        compute_dtype: Type that the engine computes in.
        weight_dtype: Type of its weights, if they have one.
        stats: The engine's, of what it wrote before it last came to rest or got new weights.
        state: What the engine had learned then.
    """

    rollout: int = 0
    responses: tuple[Response, ...] = ()
    progress: RolloutProgress = field(default_factory=RolloutProgress)
    num_done: int = 0
    is_at_rest: bool = True
    num_steps: int = 0
    compute_dtype: str = "float32"
    weight_dtype: str | None = None
    stats: dict[str, float] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)


class EngineHost:
    """Hosts one engine; a Ray actor whose methods run in threads.

    `run` is the only thread that touches the engine. Ray may carry calls of `tell` out of their order, so commands are
    numbered and wait for their turn.

    Args:
        name: What messages call it.
    """

    def __init__(self, name: str) -> None:
        forget_rank()
        self.name = f"{name} on {socket.gethostname()} (process {os.getpid()})"
        self._engine: RolloutEngine
        self._changed = threading.Condition()
        self._clock = StageClock("waiting")
        self._commands: dict[int, Command] = {}
        self._newest: dict[Kind, tuple[int, Snapshot]] = {}  # by kind, with the number of its command
        self._report, self._has_news = Report(), False
        self._ended: list[Response] = []  # since the last report
        self._loaded: dict[Kind, int] = {}  # likewise
        self._asked: list[Request] = []  # what the next `generate` begins with
        self._sampling, self._seed = Sampling(), 0
        self._before = RolloutProgress()  # what this rollout wrote before the host last came to rest

    def tell(self, number: int, command: Command, snapshot: tuple[Kind, Snapshot] | None = None) -> None:
        """Take a command, perhaps with new weights of a kind: of two that come between steps the older is dropped."""
        with self._changed:
            self._commands[number] = command
            if snapshot is not None:
                kind, newest = snapshot
                self._newest[kind] = max((number, newest), self._newest.get(kind, (0, newest)), key=itemgetter(0))
            self._changed.notify_all()

    def take(self, timeout: float) -> Report:
        """Return what has happened since the last call, as soon as something has that somebody may wait for.

        After `timeout` seconds it returns the progress.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._has_news, timeout)
            report, self._has_news = replace(self._report, responses=tuple(self._ended)), False
            self._ended.clear()
            return report

    def take_laps(self) -> list[tuple[str, float]]:
        """Return its stages with their seconds, since the last call."""
        return self._clock.take()

    def run(self, versions: dict[str, str], folder: str, pickled_engine: bytes) -> None:
        """Carry out commands and write, for as long as the host lives; `folder` is the trainer's.

        Raises:
            RuntimeError: Something failed, or this node has other packages than the trainer's.
        """
        try:
            check_versions(versions)
            enter(folder)
            engine = cloudpickle.loads(pickled_engine)
            self._engine = engine if engine.num_ranks == 1 else LedEngine(engine, self.name)
            while True:
                self._carry_out()
                if self._asked:
                    with self._clock.within("writing"):
                        self._write()
                with self._changed:
                    self._changed.wait_for(lambda: self._has_command)
        except Exception as error:
            if isinstance(getattr(self, "_engine", None), LedEngine):
                time.sleep(OWN_SECONDS)
            raise RuntimeError(f"{self.name} failed: {error}") from error

    @property
    def _has_command(self) -> bool:
        return self._report.num_done + 1 in self._commands

    def _carry_out(self) -> None:
        """Carry out all commands whose turn it is."""
        while self._has_command and self._commands[self._report.num_done + 1](self):
            del self._commands[self._report.num_done + 1]
            self._note(num_done=self._report.num_done + 1)

    def _write(self) -> None:
        """Write what was asked for, and what is added meanwhile."""
        requests, self._asked = self._asked, []
        self._note(is_at_rest=False)
        for response in self._engine.generate(requests, self._sampling, seed=self._seed, on_progress=self._after_step):
            with self._changed:  # `take` forgets what it has copied, and must not forget this
                self._ended.append(response)
                self._note()
        self._before = replace(self._report.progress, waiting=0, running=0)
        self._note(is_at_rest=True, stats=self._engine.stats(), state=self._engine.state_dict())

    def _after_step(self, progress: RolloutProgress) -> None:
        before = self._before
        total = replace(
            progress,
            finished=before.finished + progress.finished,
            tokens=before.tokens + progress.tokens,
            longest=max(before.longest, progress.longest),
        )
        self._report = replace(self._report, progress=total, num_steps=self._report.num_steps + 1)
        self._carry_out()

    def _note(self, **news: Any) -> None:
        with self._changed:
            self._report, self._has_news = replace(self._report, **news), True
            self._changed.notify_all()

    # Commands

    def set_up(self, policy: str, max_model_len: int, seed: int) -> bool:
        """Load the engine."""
        self._engine.setup(policy, max_model_len=max_model_len, seed=seed)
        self._note(compute_dtype=self._engine.compute_dtype, weight_dtype=self._engine.weight_dtype)
        return True

    def load(self, state: dict[str, Any]) -> bool:
        """Restore what an engine had learned."""
        self._engine.load_state_dict(state)
        self._note(state=state)
        return True

    def update(self, kind: Kind) -> bool:
        """Load the newest weights of a kind, unless the engine has them."""
        if not (self._report.is_at_rest or self._engine.updates_running):
            return False
        number, new = self._newest[kind]
        if self._loaded.get(kind, 0) < number:
            stats = self._engine.stats()  # new weights begin other counts
            with self._clock.within("weights"):
                if kind == "weights":
                    self._engine.update_weights(new, new.version)
                else:
                    self._engine.update_drafter(new, new.version, new.accepted)
            self._loaded[kind] = number
            self._note(stats=stats, state=self._engine.state_dict())
        return True

    def warm_up(self, num_requests: int) -> bool:
        """Measure what the engine must know, unless it writes."""
        if self._report.is_at_rest:
            self._engine.warm_up(num_requests)
        return True

    def write(self, rollout: int, requests: Sequence[Request], sampling: Sampling, seed: int) -> bool:
        """Begin requests; those of another rollout wait until the last one has ended."""
        if rollout != self._report.rollout:
            if self._asked or not self._report.is_at_rest:
                return False
            self._before, self._sampling, self._seed = RolloutProgress(), sampling, seed
            self._ended.clear()  # of a rollout that was given up
            self._note(rollout=rollout, progress=RolloutProgress(), num_steps=0)
        if self._report.is_at_rest:
            self._asked += requests
        else:
            self._engine.add(requests)
        return True

    def stop(self, ids: Collection[int]) -> bool:
        """Stop requests of the rollout, as soon as it has begun; leave alone those that have ended."""
        if self._asked:
            return False
        if not self._report.is_at_rest:
            self._engine.stop(ids)
        return True
