"""Score responses in the background while the rollout is still running."""

import asyncio
import inspect
import logging
import math
import os
import reprlib
import threading
import time
import traceback
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from threading import TIMEOUT_MAX
from typing import Annotated, Any, ClassVar, SupportsFloat

from tlt_lightning.arguments import Bound, Count, checked
from tlt_lightning.rewards.term import RewardTerm, as_terms

log = logging.getLogger(__name__)

Seconds = Annotated[float, Bound(0, TIMEOUT_MAX, excludes=(0, TIMEOUT_MAX)), "Give many seconds for no limit."]
"""A time that a thread can wait."""

MAX_STUCK = 64
"""Threads that may be stuck in calls past their time limit; more end the run, because nothing else can end them."""

MAX_AWAITED = 64
"""Awaitables that run at once; more wait, for a client's own limit would count as time of the call."""

GRACE = 5.0
"""Seconds past the time limit in which no awaitable has ended: one of them must be blocking the event loop."""

MAX_SCORE = 1e16
"""Largest score, weighted or not: advantages are computed in float32, which holds sums of its squares."""

BLOCKED = ", as an async reward blocked the event loop of all: one that computes or blocks is better a plain function"
"""Explains why awaitables are late together."""

OUR_FILES = (__file__, inspect.getfile(RewardTerm))
"""Files through which a call reaches a reward."""

SHORT = reprlib.Repr()
SHORT.maxstring = 500


@dataclass(slots=True, eq=False)
class Call:
    """Holds one reward's call for one response, and its outcome."""

    term: RewardTerm
    prompt: str
    response: str
    row: dict[str, Any]
    started: float = math.inf
    score: float | None = 0.0
    error: BaseException | None = None
    is_done: bool = False
    task: "asyncio.Task[None] | None" = None


class RewardPool:
    """Runs reward functions on threads and keeps their failures from ending or delaying a run.

    A response whose function raises, returns no finite number of reasonable size (`MAX_SCORE`), or exceeds the time
    limit gets 0; `stats` counts it, and each reward's first failure is logged with its sample and line. All awaitables
    of a process run in one event loop, so a client that keeps connections can be opened once. One that blocks the loop
    past its time limit costs those beside it, and a new loop takes its place.

    Python cannot end a thread: a call past its time limit is left behind, and a new thread takes its place; more than
    `MAX_STUCK` at once are an error. A function that holds the interpreter's lock while it hangs (a huge power, a
    runaway regular expression) or ends the process belongs in a child process.

    Args:
        terms: The rewards, each under its own name. A function's method `load()` is called here, without a time limit.
        num_workers: Plain calls that run at once.
        timeout: Seconds that one call may take, from its own start.

    Example:
        >>> from tlt_lightning.rewards import exact_match
        >>> pool = RewardPool([RewardTerm(function=exact_match)])
        >>> calls = pool.submit(0, "1 + 1 =", "2", {"answer": "2"})
        >>> pool.collect()
        {0: {'exact_match': 1.0}}
        >>> pool.close()
    """

    _loop_thread: ClassVar[threading.Thread | None] = None
    _loop: ClassVar[asyncio.AbstractEventLoop]
    _seats: ClassVar[asyncio.Semaphore]
    _changed: ClassVar = threading.Condition()  # guards all that changes below, and is told of it

    @checked()
    def __init__(self, terms: Sequence[RewardTerm], num_workers: Count = 4, timeout: Seconds = 10.0) -> None:
        self.terms = as_terms(terms)
        self.timeout = timeout
        self.stats: dict[str, int] = {}
        """Errors and timeouts of each reward (`reward/<name>_errors`, `reward/<name>_timeouts`) in the responses that
        the last `collect` returned."""
        self._submitted: dict[int, list[Call]] = {}
        self._waiting: deque[Call] = deque()
        self._running: dict[Call, threading.Thread] = {}
        self._stuck: list[tuple[threading.Thread, str]] = []  # the latter is the reward's name
        self._unscored: dict[str, list[Call]] = {term.name: [] for term in self.terms}  # since the reward's last score
        self._warned: set[str] = set()
        self._closed, self._process = False, os.getpid()
        for term in self.terms:
            if load := getattr(term.function, "load", None):
                load()
        for _ in range(num_workers):
            self._start_thread()

    def submit(self, key: int, prompt: str, response: str, row: dict[str, Any]) -> list[Call]:
        """Queue a response for every reward, and return these calls at once.

        Args:
            key: Identifies the response in what `collect` returns; the newer of two with the same key counts.
            prompt: The question.
            response: The response as text.
            row: The row of the data file; each call gets a copy of its own.
        """
        if self._closed:
            raise RuntimeError("`submit` was called on a reward pool that is closed.")
        self._submitted[key] = calls = [Call(term, prompt, response, row) for term in self.terms]
        with self._changed:
            self._waiting.extend(calls)
            self._give_up_late()  # so that calls that hang do not hold up the others until `collect`
            self._changed.notify_all()
        return calls

    def __contains__(self, key: int) -> bool:
        """Return True if `collect` has not returned what was submitted under this key."""
        return key in self._submitted

    def collect(
        self, keys: Iterable[int] | None = None, on_wait: Callable[[], None] = lambda: None
    ) -> dict[int, dict[str, float]]:
        """Wait for the scores under these keys, None being all; return them unweighted by key and reward name.

        Keys are in ascending order and rewards in the order of `terms`, however long each took; one that does not apply
        is left out. `on_wait` is called every second meanwhile, and may raise.
        """
        submitted = {key: self._submitted.pop(key) for key in sorted(self._submitted if keys is None else keys)}
        left = [call for calls in submitted.values() for call in calls]
        with self._changed:
            while not self._closed:
                self._give_up_late()
                while left and left[-1].is_done:
                    left.pop()
                if not left:
                    break
                first = min((call.started for call in self._running), default=time.monotonic())
                if not self._changed.wait(min(1.0, max(0.0, first + self.timeout - time.monotonic()))):
                    on_wait()
        self.stats = {f"reward/{term.name}_{kind}": 0 for term in self.terms for kind in ("errors", "timeouts")}
        for calls in zip(*submitted.values(), strict=True):
            failed = [call for call in calls if call.error is not None]
            for call in failed:
                self.stats[failure_metric(call)] += 1
            name = calls[0].term.name
            self._unscored[name] = self._unscored[name] + failed if len(failed) == len(calls) else []
        return {
            key: {call.term.name: call.score for call in calls if call.score is not None}
            for key, calls in submitted.items()
        }

    def check(self) -> None:
        """Raise RuntimeError if a reward has failed on two prompts or more since its last score.

        One prompt is not enough: its row may be the fault.
        """
        for name, calls in self._unscored.items():
            if len({call.prompt for call in calls}) > 1:
                raise RuntimeError(
                    f"Reward `{name}` scored none of the last {len(calls)} responses. The last error: "
                    f"{describe(calls[-1].error)}."
                )

    def close(self) -> None:
        """Give up on everything that still runs; safe to call twice."""
        with self._changed:
            for call, thread in self._running.items():
                if call.task and thread is self._loop_thread:  # which stays, for other pools
                    self._loop.call_soon_threadsafe(call.task.cancel)
            self._closed = True
            self._waiting.clear()
            self._running.clear()
            self._changed.notify_all()

    def _start_thread(self) -> None:
        # A daemon: `concurrent.futures` joins its threads when the interpreter exits, and one that hangs never ends.
        threading.Thread(target=self._work, name="reward-worker", daemon=True).start()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if self._closed:
                    return
                call = self._waiting.popleft()
                call.started = time.monotonic()
                self._running[call] = threading.current_thread()
            try:
                value = call.term(call.prompt, call.response, deepcopy(call.row))
                if inspect.isawaitable(value):
                    if self._hand_over(call, value):
                        continue
                    return
                score, error = score_of(call, value), None
            except BaseException as raised:  # the thread must survive whatever a reward does
                score, error = 0.0, raised
            if error is None and time.monotonic() - call.started > self.timeout:  # whether or not anybody has waited
                score, error = 0.0, late(self.timeout)
            if not self._finish(call, score, error):  # given up, and another thread has taken over
                return

    def _hand_over(self, call: Call, value: Awaitable[Any]) -> bool:
        """Let the loop of all pools, new if there is none (as in a fork), await the value; return False if given up."""
        with self._changed:
            thread = self._loop_thread
            if thread is None or not thread.is_alive():
                RewardPool._loop, RewardPool._seats = asyncio.new_event_loop(), asyncio.Semaphore(MAX_AWAITED)
                thread = threading.Thread(target=serve, args=(self._loop,), name="reward-loop", daemon=True)
                RewardPool._loop_thread = thread
                thread.start()
            if is_wanted := call in self._running:
                self._running[call], call.started = thread, math.inf
            asyncio.run_coroutine_threadsafe(self._await(call, value, self._seats), self._loop)
        return is_wanted

    async def _await(self, call: Call, value: Awaitable[Any], seats: asyncio.Semaphore) -> None:
        try:
            async with seats:
                if self._running.get(call) is not threading.current_thread():
                    getattr(value, "close", lambda: None)()  # or Python warns that nothing has awaited a coroutine
                    return
                call.started, call.task = time.monotonic() + GRACE, asyncio.current_task()
                score, error = score_of(call, await within(self.timeout, value, late(self.timeout))), None
        except BaseException as raised:
            score, error = 0.0, raised
        self._finish(call, score, error)

    def _give_up_late(self) -> None:
        latest = time.monotonic() - self.timeout
        for thread in {thread for call, thread in self._running.items() if call.started <= latest}:
            lost = [call for call, other in self._running.items() if other is thread]
            self._stuck.append((thread, lost[0].term.name))
            for call in lost:
                if call.started < math.inf:
                    self._end(call, 0.0, late(self.timeout, BLOCKED if call.task else ""))
                else:  # not begun, because another blocks the loop
                    del self._running[call]
                    self._waiting.append(call)
            if thread is self._loop_thread:
                self._loop.call_soon_threadsafe(self._loop.stop)
                RewardPool._loop_thread = None
            else:
                self._start_thread()
        self._stuck = [(thread, name) for thread, name in self._stuck if thread.is_alive()]
        if len(self._stuck) > MAX_STUCK:
            names = ", ".join(sorted({f"`{name}`" for _, name in self._stuck}))
            raise RuntimeError(
                f"More than {MAX_STUCK} threads are stuck in calls of {names}, past the limit of {self.timeout} s, and "
                "nothing can end them: give these functions time limits of their own, or run them in child processes."
            )

    def _finish(self, call: Call, score: float | None, error: BaseException | None) -> bool:
        """Take the outcome of a call; return False if it was given up."""
        if os.getpid() != self._process:  # a copy of the run, which the reward has forked and not ended
            os._exit(1)
        with self._changed:
            if is_wanted := self._running.get(call) is threading.current_thread():
                self._end(call, score, error)
        return is_wanted

    def _end(self, call: Call, score: float | None, error: BaseException | None) -> None:
        call.score, call.error, call.is_done = score, error, True
        del self._running[call]
        for other in [each for each in self._running if call.task and each.task]:  # their loop is not blocked
            other.started = time.monotonic() + GRACE
        self._changed.notify_all()
        if error is None or call.term.name in self._warned:
            return
        self._warned.add(call.term.name)
        log.warning(
            "Reward `%s` failed, and this response is scored 0: %s. Later failures are only counted, in `%s`. "
            "Prompt: %s. Response: %s.",
            *(call.term.name, describe(error), failure_metric(call)),
            *(SHORT.repr(call.prompt), SHORT.repr(call.response)),
        )


def failure_metric(call: Call) -> str:
    """Name the metric that counts a failed call."""
    return f"reward/{call.term.name}_{'timeouts' if isinstance(call.error, TimeoutError) else 'errors'}"


def describe(error: BaseException | None) -> str:
    """Return an error of a user's code, and the line of it that raised, if any."""
    assert error is not None
    text = "".join(traceback.format_exception_only(error)).strip()[:500]  # survives an error without a text
    frames = traceback.extract_tb(error.__traceback__)
    while any(frame.filename in OUR_FILES for frame in frames):  # and, between these, asyncio's
        frames.pop(0)
    ends = frames[:1] + frames[-1:]  # the reward's own line, and the library's that raised the error
    return text + "".join(dict.fromkeys(f", in {frame.name} at {frame.filename}:{frame.lineno}" for frame in ends))


def score_of(call: Call, returned: Any) -> float | None:
    """Return the finite score in what the reward has returned; None where it does not apply."""
    return None if (value := call.term.score_of(returned)) is None else as_score(value, call.term.weight)


def as_score(value: Any, weight: float = 1.0) -> float:
    """Return a score as a number; raise TypeError or ValueError unless it is finite and of reasonable size."""
    if not isinstance(value, SupportsFloat):  # a str is not one
        raise TypeError(f"returned {value!r}, which is no number")
    if not math.isfinite(score := float(value)):
        raise ValueError(f"returned {value!r}, which is not finite")
    if max(abs(score), abs(score * weight)) > MAX_SCORE:
        raise ValueError(f"returned {value!r} with weight {weight}, which is beyond {MAX_SCORE:g}")
    return score


async def within(seconds: float, value: Awaitable[Any], late: Exception) -> Any:
    """Await `value` for `seconds` at most, then cancel it and raise `late`."""
    try:
        async with asyncio.timeout(None) as limit:
            timer = asyncio.create_task(expire(limit, seconds))
            return await value
    except TimeoutError as error:
        if limit.expired():
            raise late from error
        raise
    finally:
        timer.cancel()


async def expire(limit: asyncio.Timeout, seconds: float) -> None:
    """End a limit after `seconds` in ten parts; each counts once, however long others block the loop in it."""
    for _ in range(10):
        await asyncio.sleep(seconds / 10)
    limit.reschedule(0)


def late(timeout: float, why: str = "") -> TimeoutError:
    """Make the error of a call that did not end within `timeout` s."""
    return TimeoutError(f"no score within {timeout} s{why}")


def serve(loop: asyncio.AbstractEventLoop) -> None:
    """Run a loop until it is stopped, then end what is left on it."""
    loop.run_forever()
    if left := asyncio.all_tasks(loop):
        for task in left:
            task.cancel()
        loop.run_until_complete(asyncio.wait(left, timeout=GRACE))
    loop.close()
