"""Call environments beside the engine, and keep what hangs from holding up a run."""

import asyncio
import inspect
import queue
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any

from tlt_lightning.rewards.pool import GRACE, MAX_STUCK, serve, within

MAX_THREADS = 256
"""Plain methods that run at once; more wait."""


class Late(TimeoutError):
    """Says that an environment did not answer in time."""


class CallThreads:
    """Runs each call at once, on a thread that has ended others or on a new one.

    Daemons: threads of an executor are joined when the interpreter exits, and one that hangs never ends. Where many
    programs share a core, the start of a thread takes a tenth of a second: hundreds would hold up the loop.
    """

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)

    def run(self, call: Callable[[], None]) -> None:
        """Begin a call, which must not raise."""
        self._calls.put(call)
        if not self._idle.acquire(blocking=False):
            threading.Thread(target=self._work, name="environment", daemon=True).start()

    def close(self) -> None:
        """End the threads, each when its call has ended; no further call is begun."""
        self._calls.put(None)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            self._idle.release()
        self._calls.put(None)  # for the next thread


class EnvironmentWorkers:
    """Runs jobs of many conversations at once, on one event loop: coroutines there, plain methods on a thread each.

    Python cannot end a thread: a call past its time limit is left behind.

    Args:
        seconds: Time limit of a call.
        on_wait: Called every second in which `take` waits.
    """

    def __init__(self, seconds: float, on_wait: Callable[[], None] = lambda: None) -> None:
        self.seconds, self._on_wait = seconds, on_wait
        self._ended: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
        self.under_way: dict[Any, None] = {}
        """Keys of the jobs that `take` has not returned, oldest first."""
        self._threads = CallThreads()
        self._stuck: list[threading.Event] = []  # of calls past their limit, each set when its call ends after all
        self._loop: asyncio.AbstractEventLoop | None = None
        self._seats = asyncio.Semaphore(MAX_THREADS)
        self._beat = 0.0  # when the loop was last seen running

    def submit(self, key: Any, job: Coroutine[Any, Any, Any]) -> None:
        """Begin a job, which calls by `call`; `take` returns its key, new among those under way, and its result."""
        if self._loop is None:
            self._loop, self._seats = asyncio.new_event_loop(), asyncio.Semaphore(MAX_THREADS)
            self._threads = CallThreads()
            self._loop.call_soon(self._show_life, self._loop)
            self._beat = time.monotonic()
            threading.Thread(target=serve, args=(self._loop,), name="environments", daemon=True).start()
        self.under_way[key] = None
        asyncio.run_coroutine_threadsafe(self._run(key, job), self._loop)

    def take(self, *, wait: bool) -> list[tuple[Any, Any]]:
        """Return the jobs that have ended, each with its result or the exception that it raised.

        With `wait` there is one at least, if any is under way.

        Raises:
            RuntimeError: Too many threads are stuck.
        """
        ended: list[tuple[Any, Any]] = []
        while self.under_way:
            try:
                key, result = self._ended.get(wait and not ended, timeout=1.0)
            except queue.Empty:
                if not wait or ended:
                    break
                if time.monotonic() - self._beat > self.seconds + GRACE:
                    ended = self._give_up_loop()
                self._on_wait()
                continue
            if key in self.under_way:
                del self.under_way[key]
                ended.append((key, result))
        if sum(not has_ended.is_set() for has_ended in self._stuck) > MAX_STUCK:
            raise RuntimeError(
                f"More than {MAX_STUCK} threads are stuck in methods of the environment, past the limit of "
                f"{self.seconds} s, and nothing can end them: give what they call a time limit of its own, or run it "
                "in child processes."
            )
        return ended

    async def call(self, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Return what a method returns, a coroutine's result, too; raise `Late` if that takes too long."""
        if inspect.iscoroutinefunction(method):
            return await self._in_time(method(*args, **kwargs))
        async with self._seats:
            value = await self._in_time(self._in_thread(partial(method, *args, **kwargs)))
        return await self._in_time(value) if inspect.isawaitable(value) else value

    def close(self) -> None:
        """Give up on everything that still runs; safe to call twice."""
        self.under_way.clear()
        if self._loop is not None:
            self._threads.close()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._loop = None

    async def _run(self, key: Any, job: Coroutine[Any, Any, Any]) -> None:
        try:
            result = await job
        except BaseException as error:  # the loop must survive whatever an environment does
            result = error
        self._ended.put((key, result))

    async def _in_time(self, value: Any) -> Any:
        return await within(self.seconds, value, Late(f"no answer within {self.seconds} s"))

    async def _in_thread(self, function: Callable[[], Any]) -> Any:
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()

        def settle(value: Any, error: BaseException | None) -> None:
            if not outcome.done():
                outcome.set_result((value, error))

        has_ended = threading.Event()

        def work() -> None:
            value, error = None, None
            try:
                value = function()
            except BaseException as raised:
                error = raised
            has_ended.set()
            with suppress(RuntimeError):  # the loop was given up
                loop.call_soon_threadsafe(settle, value, error)

        self._threads.run(work)
        try:
            value, error = await outcome
        except asyncio.CancelledError:
            if outcome.cancelled():
                self._stuck = [each for each in self._stuck if not each.is_set()] + [has_ended]
                raise
            value, error = outcome.result()  # it came in time; the loop, on a busy machine, did not
        if error is not None:
            raise error
        return value

    def _show_life(self, loop: asyncio.AbstractEventLoop) -> None:
        self._beat = time.monotonic()
        loop.call_later(1.0, self._show_life, loop)

    def _give_up_loop(self) -> list[tuple[Any, Any]]:
        """Leave the event loop to the coroutine that blocks it; return all jobs on it as late."""
        late = Late(f"a coroutine of the environment blocked its event loop for more than {self.seconds} s")
        lost = [(key, late) for key in self.under_way]
        self.close()
        return lost
