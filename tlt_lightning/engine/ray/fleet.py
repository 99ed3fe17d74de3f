"""Write with several engine hosts as with one engine: deal requests out, merge what they write, replace the dead."""

import logging
import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any

import ray
from ray import cloudpickle

from tlt_lightning.engine.base import NamedTensors, OnProgress, RolloutEngine, RolloutProgress
from tlt_lightning.engine.ray.host import Command, EngineHost, Kind
from tlt_lightning.engine.ray.remote_host import HostDied, RemoteHost
from tlt_lightning.engine.ray.snapshot import Snapshot, SnapshotWriter
from tlt_lightning.rollout import Request, Response, Sampling
from tlt_lightning.seeds import seed_of
from tlt_lightning.speculation.strategy import OFF

log = logging.getLogger(__name__)

MAX_DEATHS = 3
"""Processes of one host that may die in turn without an answer in between; with one more the run ends."""

_GROUPS = 65536  # that are remembered, as conversations come back to the host that has read them


class Fleet:
    """The engine hosts of one rank of the trainer.

    Args:
        engine: What each of them hosts, not set up.
        names: One for each.
        num_gpus: GPUs of each; a part of one is shared with other processes.
        set_up_for: Policy, `max_model_len` and seed.
    """

    def __init__(
        self, engine: RolloutEngine, names: Sequence[str], num_gpus: float, set_up_for: tuple[str, int, int]
    ) -> None:
        self.set_up_for = set_up_for
        self._writers: dict[Kind, SnapshotWriter] = {}
        self._newest: dict[Kind, Future[Snapshot]] = {}  # which new hosts take, too
        self._rollout, self._sampling, self._seed = 0, Sampling(), 0
        self._host_of: dict[int, RemoteHost] = {}  # by group of this rollout
        pickled, resources = cloudpickle.dumps(engine), {"num_cpus": float(engine.num_ranks), "num_gpus": num_gpus}
        self.hosts = [RemoteHost(index, name, pickled, resources) for index, name in enumerate(names)]
        try:
            for host in self.hosts:
                self._brief(host)
            while not all(host.is_done for host in self.hosts):
                self._take()
        except BaseException:
            self.close()
            raise

    def publish(
        self,
        kind: Kind,
        named_tensors: NamedTensors,
        version: int,
        dtype: str | None,
        accepted: Sequence[float] | None = None,
    ) -> None:
        """Let every host load them between two of its steps, as soon as it can; they may change when this returns."""
        writer = self._writers.setdefault(kind, SnapshotWriter())
        self._newest[kind] = snapshot = writer.write(named_tensors, version, dtype, accepted)
        for host in self.hosts:
            host.update(kind, snapshot)

    def tell(self, command: Command) -> None:
        """Give every host a command."""
        for host in self.hosts:
            host.tell(command)

    def load(self, states: Sequence[dict[str, Any]]) -> None:
        """Restore what hosts had learned; if there were others, some share or none has what one had."""
        for host in self.hosts:
            state = states[host.index % len(states)]
            host.report = replace(host.report, state=state)  # until it says so itself
            host.tell(partial(EngineHost.load, state=state))

    def write(
        self, requests: Sequence[Request], sampling: Sampling, seed: int, on_progress: OnProgress | None
    ) -> Iterator[Response]:
        """Begin requests, in place of what was being written; return responses as they end, until all are answered."""
        self._give_up()
        self._rollout += 1
        self._sampling, self._seed = sampling, seed
        self._host_of.clear()
        self.ask(requests)
        return self._responses(self._rollout, on_progress)

    def _responses(self, rollout: int, on_progress: OnProgress | None) -> Iterator[Response]:
        started, num_answered = time.perf_counter(), 0
        try:
            while rollout == self._rollout and not all(host.is_done for host in self.hosts):
                responses = self._take()
                num_answered += len(responses)
                if on_progress is not None:
                    on_progress(self._progress(num_answered, time.perf_counter() - started))
                yield from responses
        finally:
            if rollout == self._rollout:
                self._give_up()

    def _give_up(self) -> None:
        self.stop(self.open_ids)
        for host in self.hosts:
            host.open.clear()
            host.stopped.clear()

    def ask(self, requests: Sequence[Request]) -> None:
        """Deal requests out: a group stays on one host, for its prompt and its siblings' texts.

        New groups go to the idlest host, negative ones in turn.
        """
        shares: dict[RemoteHost, list[Request]] = {}
        for request in requests:
            if request.group not in self._host_of:
                in_turn = self.hosts[request.group % len(self.hosts)]
                idlest = min(self.hosts, key=lambda host: len(host.open))
                self._host_of[request.group] = in_turn if request.group < 0 else idlest
                if len(self._host_of) > _GROUPS:
                    del self._host_of[next(iter(self._host_of))]
            host = self._host_of[request.group]
            host.open[request.id] = request
            shares.setdefault(host, []).append(request)
        for host, share in shares.items():
            host.tell(self._to_write(host, share))

    def stop(self, ids: Collection[int]) -> None:
        """Stop requests; those that have been answered are left alone."""
        for host in self.hosts:
            if stopped := host.open.keys() & {*ids}:
                host.stopped |= stopped
                host.tell(partial(EngineHost.stop, ids=stopped))

    @property
    def open_ids(self) -> set[int]:
        """Ids of requests that are not answered."""
        return {number for host in self.hosts for number in host.open}

    def stats(self) -> dict[str, float]:
        """Return the engines' stats of the last rollout, averaged by their steps."""
        reports = [host.report for host in self.hosts]
        found: dict[str, float] = {}
        for name in dict.fromkeys(name for report in reports for name in report.stats):
            values = [(report.stats[name], report.num_steps) for report in reports if name in report.stats]
            total = sum(steps for _, steps in values)
            if total:
                found[name] = sum(value * steps for value, steps in values) / total
        return found

    def close(self) -> None:
        """End all hosts; safe to call twice. What was being written ends, for who reads on would start new ones."""
        self._rollout += 1
        for host in self.hosts:
            host.kill()
        for writer in self._writers.values():
            writer.close()

    def _to_write(self, host: RemoteHost, requests: Sequence[Request]) -> Command:
        return partial(
            EngineHost.write,
            rollout=self._rollout,
            requests=requests,
            sampling=self._sampling,
            seed=seed_of(self._seed, host.index),
        )

    def _take(self) -> list[Response]:
        """Wait for a host to report, and return what has ended."""
        for snapshot in self._newest.values():
            if snapshot.done():
                snapshot.result()  # or what went wrong, for no host hears of it
        handles = [handle for host in self.hosts for handle in host.handles]
        ray.wait(handles, timeout=1.0)
        ready = {*ray.wait(handles, num_returns=len(handles), timeout=0)[0]}
        responses: list[Response] = []
        for host in self.hosts:
            try:
                responses += host.receive(ready, self._rollout)
            except HostDied as death:
                self._replace(host, death)
        return responses

    def _replace(self, host: RemoteHost, death: HostDied) -> None:
        if host.num_deaths > MAX_DEATHS:
            raise RuntimeError(
                f"{host.name} has died {host.num_deaths} times without answering a request, and is not replaced any "
                f"more. If it lacks memory, lower `max_num_seqs` or `num_engines`. The last reason: {death}"
            ) from death
        log.warning(
            "%s died, and a new one takes its place: it takes the newest weights, and writes %d responses again. %s",
            host.name,
            len(host.open),
            death,
        )
        host.kill()
        host.start()
        self._brief(host)

    def _brief(self, host: RemoteHost) -> None:
        """Tell a new process all that the one before it knew."""
        policy, max_model_len, seed = self.set_up_for
        host.tell(
            partial(EngineHost.set_up, policy=policy, max_model_len=max_model_len, seed=seed_of(seed, host.index))
        )
        if host.report.state:
            host.tell(partial(EngineHost.load, state=host.report.state))
        for kind, snapshot in self._newest.items():
            host.update(kind, snapshot)
        if host.open:
            host.tell(partial(EngineHost.warm_up, num_requests=len(host.open)))
            host.tell(self._to_write(host, [*host.open.values()]))
            if host.stopped:
                host.tell(partial(EngineHost.stop, ids={*host.stopped}))

    def _progress(self, num_answered: int, elapsed: float) -> RolloutProgress:
        """Add up the progress of all hosts."""
        reports = [host.report.progress for host in self.hosts if host.report.rollout == self._rollout]
        running = sum(each.running for each in reports)
        drafts = sum(each.acceptance_length * each.running for each in reports)
        busiest = max(reports, key=lambda each: each.running, default=None)
        return RolloutProgress(
            waiting=max(0, len(self.open_ids) - running),
            running=running,
            finished=num_answered,
            tokens=sum(each.tokens for each in reports),
            longest=max((each.longest for each in reports), default=0),
            elapsed=elapsed,
            strategy=OFF if busiest is None else busiest.strategy,
            acceptance_length=drafts / running if running else 1.0,
        )
