"""Scores responses while the rollout is still running, whatever the reward functions do."""

from __future__ import annotations

import asyncio
import logging
import math
import traceback
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from tlt_lightning.rewards._workers import LoopThread, Workers
from tlt_lightning.rewards.term import RewardTerm

log = logging.getLogger(__name__)

MAX_FAILURES = 32
MAX_LOGGED_CHARACTERS = 500


@dataclass(frozen=True, slots=True)
class RewardFailure:
    """A sample that a reward function could not score.

    Args:
        term: Name of the reward.
        key: The key it was submitted under.
        prompt: The prompt.
        response: The response.
        error: Type and text of the exception.
    """

    term: str
    key: int
    prompt: str
    response: str
    error: str


class RewardPool:
    """Runs reward functions in the background and keeps their failures from ending or delaying a run.

    A function that raises, returns something other than a finite number, or exceeds the time limit gets `on_error`; it
    is counted in `stats`, kept in `failures`, and each reward's first failure is logged with its sample. Python cannot
    end a thread, so a function that hangs is left behind on its thread and another takes its place. A function that
    holds the interpreter's lock while it hangs (a huge power, a runaway regular expression) stops the process all the
    same and belongs in a child process.

    Args:
        terms: The rewards, each under its own name. A function object with a method `load()` has it called here,
            without a time limit.
        num_workers: Calls that run at once, plain and async together.
        timeout: Seconds that one call may take, from its own start.
        on_error: Score of a response that could not be scored.

    Example:
        >>> from tlt_lightning.rewards import exact_match
        >>> pool = RewardPool([RewardTerm(function=exact_match)])
        >>> pool.submit(0, "1 + 1 =", "2", {"answer": "2"})
        >>> pool.collect()
        {0: {'exact_match': 1.0}}
        >>> pool.close()
    """

    def __init__(
        self, terms: Sequence[RewardTerm], num_workers: int = 4, timeout: float = 10.0, on_error: float = 0.0
    ) -> None:
        names = Counter(term.name for term in terms)
        if not names:
            raise ValueError("`terms` must hold at least one reward, got none.")
        if max(names.values()) > 1:
            raise ValueError(f"`terms` must have different names, got {list(names.elements())}; set `name`.")
        if num_workers < 1:
            raise ValueError(f"`num_workers` must be at least 1, got {num_workers}.")
        if not timeout > 0:
            raise ValueError(f"`timeout` must be a positive number of seconds, got {timeout}.")
        if not math.isfinite(on_error):
            raise ValueError(f"`on_error` must be a finite number, got {on_error}.")
        self.terms = tuple(terms)
        self.num_workers = num_workers
        self.timeout = timeout
        self.on_error = on_error
        self.stats: dict[str, int] = {}
        """Errors and timeouts of each reward (`reward/<name>_errors`, `reward/<name>_timeouts`) in the responses that
        the last `collect` returned."""
        self.failures: deque[RewardFailure] = deque(maxlen=MAX_FAILURES)
        """The latest failures, oldest first."""
        self._counts: Counter[str] = Counter()
        self._warned: set[str] = set()
        self._pending: dict[int, list[Future[float]]] = {}
        self._closed = False
        self._slots = asyncio.Semaphore(num_workers)
        for term in self.terms:
            if load := getattr(term.function, "load", None):
                load()
        self._scheduler = LoopThread("reward-scheduler")
        self._workers = Workers(num_workers, timeout)

    def submit(self, key: int, prompt: str, response: str, row: dict[str, Any]) -> None:
        """Have a response scored by every reward, and return at once.

        Args:
            key: Identifies the response in what `collect` returns.
            prompt: The question.
            response: The response as text.
            row: The row of the data file; rewards share it and must not change it.
        """
        if self._closed:
            raise RuntimeError("`submit` was called on a reward pool that is closed.")
        if key in self._pending:
            raise ValueError(f"`key` {key} was submitted already; use each key once between two calls of `collect`.")
        self._pending[key] = [
            self._scheduler.start(self._score(term, key, prompt, response, row)) for term in self.terms
        ]

    def collect(self) -> dict[int, dict[str, float]]:
        """Wait for everything submitted since the last call; return the unweighted scores by key and reward name.

        Keys are in ascending order and rewards in the order of `terms`, however long each took.
        """
        pending, self._pending = self._pending, {}
        scores = {
            key: {term.name: future.result() for term, future in zip(self.terms, pending[key], strict=True)}
            for key in sorted(pending)
        }
        counts, self._counts = self._counts, Counter()
        kinds = ("errors", "timeouts")
        self.stats = {name: counts[name] for term in self.terms for name in (f"reward/{term.name}_{k}" for k in kinds)}
        return scores

    def close(self) -> None:
        """Give up on everything that is still running; safe to call twice."""
        if not self._closed:
            self._closed = True
            self._scheduler.stop()
            self._workers.stop()

    async def _score(self, term: RewardTerm, key: int, prompt: str, response: str, row: dict[str, Any]) -> float:
        # A slot is a thread with nothing to do, so that a call starts, and its time counts, as soon as it has one.
        async with self._slots:
            call = self._workers.call(term.function, prompt, response, row)
            try:
                score, error = await asyncio.wait_for(asyncio.wrap_future(call), self.timeout)
            except TimeoutError:
                score, error = self.on_error, TimeoutError(f"no score within {self.timeout} s")
                if call.cancel():  # False if it finished just now, and its thread with it
                    self._workers.add()
        if error is None or self._closed:
            return score
        text = "".join(traceback.format_exception_only(error)).strip()  # survives an exception that cannot be printed
        self._report(term, error, RewardFailure(term.name, key, prompt, response, shorten(text)))
        return self.on_error

    def _report(self, term: RewardTerm, error: BaseException, failure: RewardFailure) -> None:
        metric = f"reward/{term.name}_{'timeouts' if isinstance(error, TimeoutError) else 'errors'}"
        self._counts[metric] += 1
        self.failures.append(failure)
        if term.name not in self._warned:
            self._warned.add(term.name)
            log.warning(
                "Reward `%s` failed, and this response is scored %g: %s. Later failures are only counted, in `%s`. "
                "Prompt: %r. Response: %r.",
                *(term.name, self.on_error, failure.error, metric),
                *(shorten(failure.prompt), shorten(failure.response)),
            )


def shorten(text: str) -> str:
    """Leave out the middle of a long text; both ends tell more."""
    if len(text) <= MAX_LOGGED_CHARACTERS:
        return text
    half = MAX_LOGGED_CHARACTERS // 2
    return f"{text[:half]} [...] {text[-half:]}"
