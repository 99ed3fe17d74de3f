"""Speak with an engine host from the trainer's process."""

import logging
import os
import time
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from tlt_lightning.engine.ray.cluster import installed_versions
from tlt_lightning.engine.ray.host import Command, EngineHost, Kind, Report
from tlt_lightning.engine.ray.snapshot import Snapshot
from tlt_lightning.rollout import Request, Response

log = logging.getLogger(__name__)

START_SECONDS = 300
"""Seconds in which a process must start, before it loads: without room in the cluster Ray would wait for ever."""

STUCK_SECONDS = 300
"""Seconds without an engine step or the end of a command, after which it is said which engine is waited for."""

MUTE_SECONDS = 100
"""Seconds without a report, of which its own thread makes five a second, after which a process counts as dead."""

_REPORT_SECONDS = 0.2  # between two reports of progress
_AWAY_SECONDS = 10  # between two looks at it, after which nobody has waited for it
_LAPS_SECONDS = 1.0  # that an iteration waits for the stages of a host


class HostDied(Exception):
    """Says why a host's process is gone."""


class RemoteHost:
    """One engine host and what it was asked for; its process may be replaced.

    Args:
        index: Number among the hosts of this rank.
        name: What messages call it.
        pickled_engine: The engine, not set up.
        resources: What Ray gives the process, `num_cpus` and `num_gpus`.
    """

    def __init__(self, index: int, name: str, pickled_engine: bytes, resources: Mapping[str, float]) -> None:
        self.index, self.name = index, name
        self.open: dict[int, Request] = {}
        """Requests that it has not answered, by id."""
        self.stopped: set[int] = set()
        """Ids of open requests that were stopped."""
        self.report = Report()
        """Its last."""
        self.num_deaths = 0
        """Losses since it last answered a request."""
        self._never_started = False
        self._pickled_engine, self._resources = pickled_engine, resources
        self.start()

    def start(self) -> None:
        """Start a process, in place of one that died; it ends with this one at the latest."""
        self._num_told, self._has_started = 0, False
        self._polled = self._heard = self._got_on = time.monotonic()
        self.report = Report(state=self.report.state)
        # Of its threads one runs the engine, one reports, two take commands.
        remote: Any = ray.remote(EngineHost)
        self._actor = remote.options(max_concurrency=4, **self._resources).remote(self.name)
        self._running = self._actor.run.remote(installed_versions(), os.getcwd(), self._pickled_engine)
        self._taking = self._actor.take.remote(_REPORT_SECONDS)

    def tell(self, command: Command) -> None:
        """Give a command, which is carried out after those before it."""
        self._num_told += 1
        self._actor.tell.remote(self._num_told, command)

    def update(self, kind: Kind, snapshot: Future[Snapshot]) -> None:
        """Let it load a snapshot, by a command that travels when the snapshot exists."""
        self._num_told += 1
        tell = partial(self._actor.tell.remote, self._num_told, partial(EngineHost.update, kind=kind))
        snapshot.add_done_callback(lambda done: done.exception() or tell((kind, done.result())))

    @property
    def is_done(self) -> bool:
        """True if it has carried out all commands and answered all requests."""
        return not self.open and self.report.is_at_rest and self.report.num_done == self._num_told

    @property
    def handles(self) -> tuple[Any, Any]:
        """Handles of Ray that are ready when `receive` has something to say."""
        return self._taking, self._running

    def receive(self, ready: set[Any], rollout: int) -> list[Response]:
        """Return responses of this rollout that have ended, each once.

        Args:
            ready: Those of the handles of all hosts that are ready.
            rollout: Number of the rollout.

        Raises:
            HostDied: Its process is gone, or gives no sign of life.
            RuntimeError: The engine failed, or its process does not start.
        """
        self._check_life(has_reported=self._taking in ready)
        responses: list[Response] = []
        try:
            if self._taking in ready:
                report = ray.get(self._taking)
                self._has_started = True
                self._taking = self._actor.take.remote(_REPORT_SECONDS)
                self._warn_if_stuck(report)
                self.report = replace(report, responses=())
                if report.rollout == rollout:
                    responses = [each for each in report.responses if self.open.pop(each.request_id, None) is not None]
            if self._running in ready:
                ray.get(self._running)
        except RayTaskError as error:
            raise RuntimeError(str(error.cause)) from error
        except RayError as error:
            if not responses:
                raise self._death(str(error)) from error
        if responses:
            self.num_deaths = 0
            self.stopped &= self.open.keys()
        return responses

    def _check_life(self, *, has_reported: bool) -> None:
        """Raise if it has not reported for too long, while somebody has waited for it."""
        now = time.monotonic()
        if now > self._polled + _AWAY_SECONDS:
            self._heard = self._got_on = now
        elif has_reported:
            self._heard = now
        self._polled = now
        if not self._has_started and now > self._heard + START_SECONDS:
            raise RuntimeError(
                f"{self.name} has not started in {START_SECONDS} seconds: the cluster has no room for {self._resources}"
                ", as after the loss of a node, or beside another run. Free one, and resume from the last checkpoint."
            )
        if self._has_started and now > self._heard + MUTE_SECONDS:
            raise self._death(f"Its process has given no sign of life for {MUTE_SECONDS} seconds.")

    def _warn_if_stuck(self, report: Report) -> None:
        """Warn, once, of an engine that reports but gets nowhere."""
        before = self.report
        if self.is_done or (report.num_done, report.num_steps) != (before.num_done, before.num_steps):
            self._got_on = self._polled
        elif self._polled > self._got_on + STUCK_SECONDS:
            self._got_on = float("inf")
            log.warning(
                "%s has ended neither an engine step nor a command for %d s, and the run waits for it. A large policy "
                "may take that long to load; else it hangs: end its process, which `ray list actors` names, and a new "
                "one takes its place.",
                *(self.name, STUCK_SECONDS),
            )

    def _death(self, reason: str) -> HostDied:
        """Count a death; one that never started may have been lost with the process before it, which counts."""
        self.num_deaths += self._has_started or self._never_started
        self._never_started = not self._has_started
        return HostDied(reason)

    def take_laps(self) -> list[tuple[str, float]]:
        """Return its stages with their seconds since the last call; none of a process that is gone or stuck."""
        try:
            return ray.get(self._actor.take_laps.remote(), timeout=_LAPS_SECONDS)
        except RayError:
            return []

    def kill(self) -> None:
        """End the process; safe to call twice."""
        with suppress(RayError):
            ray.kill(self._actor)
