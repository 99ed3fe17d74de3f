"""Threads that can be given up on: calls that outlive their time limit are left behind, never waited for.

`concurrent.futures.ThreadPoolExecutor` cannot do this: it joins its threads when the interpreter exits.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import math
import queue
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future, InvalidStateError
from typing import Any, SupportsFloat, TypeVar

T = TypeVar("T")
Outcome = tuple[float, BaseException | None]
"""A score and None, or anything and the exception that came instead; exceptions travel as values because asyncio treats
some of them (StopIteration, SystemExit, CancelledError) as its own."""


class LoopThread:
    """An asyncio event loop on a daemon thread."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def start(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run `coroutine` on the loop, from any other thread."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def is_responsive(self) -> bool:
        """False if a coroutine blocks the loop's thread, and with it all other coroutines."""
        try:
            self.start(asyncio.sleep(0)).result(0.25)
        except TimeoutError:
            return False
        return True

    def stop(self) -> None:
        """Cancel what runs and end the thread, without waiting for it."""
        with contextlib.suppress(RuntimeError):  # closed already
            self.loop.call_soon_threadsafe(self.loop.stop)

    def _run(self) -> None:
        self.loop.run_forever()
        self.loop.run_until_complete(cancel_others())
        self.loop.close()


async def cancel_others() -> None:
    """Cancel all other tasks of the running loop and wait until they have cleaned up."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


class Workers:
    """Daemon threads that call functions and finish their coroutines on one shared event loop.

    Args:
        num_workers: Threads to start.
        timeout: Seconds after which a coroutine is cancelled. Functions cannot be; see `call`.
    """

    def __init__(self, num_workers: int, timeout: float) -> None:
        self.timeout = timeout
        self._num_workers = num_workers
        self._calls: queue.SimpleQueue[tuple[Future[Outcome], Callable[..., Any], tuple[Any, ...]] | None]
        self._calls = queue.SimpleQueue()
        self._coroutines = LoopThread("reward-coroutines")
        for _ in range(num_workers):
            self.add()

    def add(self) -> None:
        """Start one more thread, in the place of one that is stuck."""
        threading.Thread(target=self._work, name="reward-worker", daemon=True).start()

    def call(self, function: Callable[..., Any], *args: Any) -> Future[Outcome]:
        """Call `function` on a free thread; cancelling the future gives up on that thread."""
        future: Future[Outcome] = Future()
        self._calls.put((future, function, args))
        return future

    def stop(self) -> None:
        """End the threads that are not stuck, without waiting for them."""
        for _ in range(self._num_workers):
            self._calls.put(None)
        self._coroutines.stop()

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            future, function, args = call
            try:
                outcome: Outcome = (self._score(function, args), None)
            except BaseException as error:  # the thread must survive whatever a reward does; the pool reports it
                outcome = (0.0, error)
            try:
                future.set_result(outcome)
            except InvalidStateError:  # cancelled: the time limit has passed and another thread has taken over
                return

    def _score(self, function: Callable[..., Any], args: tuple[Any, ...]) -> float:
        value = function(*args)
        if inspect.isawaitable(value):
            value = self._finish(value)
        if not isinstance(value, SupportsFloat):  # a str is not one
            raise TypeError(f"returned {value!r}, which is no number")
        if not math.isfinite(score := float(value)):
            raise ValueError(f"returned {value!r}, which is not finite")
        return score

    def _finish(self, awaitable: Awaitable[Any]) -> Any:
        coroutines = self._coroutines
        future = coroutines.start(contained(awaitable))
        try:
            return future.result(self.timeout)
        except TimeoutError:
            if future.done():  # raised by the coroutine itself
                raise
            future.cancel()
            if not coroutines.is_responsive() and self._coroutines is coroutines:
                self._coroutines = LoopThread("reward-coroutines")
            raise TimeoutError(f"no score within {self.timeout} s") from None


async def contained(awaitable: Awaitable[Any]) -> Any:
    """Await, keeping exceptions that would end the event loop away from it."""
    try:
        return await awaitable
    except (SystemExit, KeyboardInterrupt) as error:
        raise RuntimeError(f"raised {type(error).__name__}") from error
