"""Hold an engine's `generate` open, over as many iterations as its requests take."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from time import perf_counter

from tlt_lightning.data.prompts import PromptSource
from tlt_lightning.engine.base import OnProgress, RolloutEngine, RolloutProgress
from tlt_lightning.engine.requests import expected
from tlt_lightning.environments.conversation import Trajectory
from tlt_lightning.environments.turns import Turns
from tlt_lightning.rollout import Prompt, Request, Response, Sampling


class RequestStream(Iterator[Response]):
    """Asks an engine for responses, and yields them as they end; it ends when all that was asked for is answered.

    Ids are those of the run, so that requests of several iterations may be open at once. One that has been answered
    may be asked for again, with more `written`.

    Args:
        engine: Writes them.
        tell: Told of its progress since `begin`.
    """

    gives_rewards = False
    """True if responses are conversations whose environments score them."""

    def __init__(self, engine: RolloutEngine, tell: OnProgress = lambda progress: None) -> None:
        self.engine, self.tell = engine, tell
        self.open_ids: set[int] = set()
        """Ids of the requests that are not answered."""
        self.trace: list[RolloutProgress] = []
        """Progress after each engine step since `begin`."""
        self._responses: Iterator[Response] | None = None  # of the `generate` that is open
        self._unread: list[Request] | None = None  # what it begins with, until it is read: then engines take more
        self._started = self._begun = 0.0
        self._last = self._before = RolloutProgress()

    @property
    def can_stay_open(self) -> bool:
        """True if requests may run on while the policy learns: in one rank's engine, which keeps memory of its own."""
        engine = self.engine
        return engine.updates_running and (engine.runs_on or not engine.sleeps) and engine.num_ranks == 1

    def speak(self, source: PromptSource, turns: Turns, room: int) -> None:
        """Say how conversations are held from now on: as `source` has its prompts, the longest of `room` tokens."""

    def begin(self) -> None:
        """Count progress from here on: from the engine's last step where it writes unread, else from now."""
        self.trace, self._before = [], self._last
        self._begun = self._last.elapsed if self.engine.runs_on else perf_counter() - self._started

    def ask(
        self, requests: Sequence[Request], sampling: Sampling, *, seed: int, prompts: Sequence[Prompt] = ()
    ) -> None:
        """Ask for responses; `sampling` and `seed` are those of the first ask of a `generate`.

        Ranks that are one engine ask together, also for nothing. `prompts` are those of the requests.
        """
        self.open_ids |= {request.id for request in requests}
        if self._unread is not None:
            self._unread += requests
        elif self._responses is not None:
            if requests:
                self.engine.add(requests)
        elif requests or self.engine.num_ranks > 1:
            self._started, self._begun = perf_counter(), 0.0
            self._last = self._before = RolloutProgress()
            self._unread = [*requests]
            self._responses = expected(self._generate(sampling, seed), self.open_ids)

    def __next__(self) -> Response:
        response = None if self._responses is None else next(self._responses, None)
        if response is None:
            self._responses = None
            if self.open_ids:
                raise RuntimeError(f"The engine finished without answering requests {sorted(self.open_ids)!s:.200}.")
            raise StopIteration
        return response

    def stop(self, ids: Collection[int]) -> None:
        """Stop those of the requests that are open: what they have comes back as responses that are `unfinished`."""
        if stopped := self.open_ids & {*ids}:
            self.engine.stop(stopped)

    def set_aside(self) -> list[Response]:
        """Stop all that is open, and return what is written of it."""
        self.stop(self.open_ids)
        return list(self)

    def trajectory(self, number: int, *, forget: bool = False) -> Trajectory | None:
        """Return the conversation of a response, if it was one."""
        return None

    def tell_again(self) -> None:
        """Tell of the same progress while the engine is waited for by nobody: a run ends where it is told of some."""
        self.tell(self.trace[-1] if self.trace else RolloutProgress(waiting=len(self.open_ids)))

    def close(self) -> None:
        """Give up what is open."""
        self._responses, self._unread, self.open_ids = None, None, set()

    def _generate(self, sampling: Sampling, seed: int) -> Iterator[Response]:
        requests, self._unread = self._unread or [], None
        yield from self.engine.generate(requests, sampling, seed=seed, on_progress=self._follow)

    def _follow(self, progress: RolloutProgress) -> None:
        self._last, before = progress, self._before
        self.trace.append(
            replace(
                progress,
                finished=progress.finished - before.finished,
                tokens=progress.tokens - before.tokens,
                elapsed=progress.elapsed - self._begun,
            )
        )
        self.tell(self.trace[-1])
