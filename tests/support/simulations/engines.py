"""A model of dispatch: engines with room for some requests, which they take from a queue each or from one of all."""

import math
import random
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from statistics import mean
from typing import Literal

from tlt_lightning.engine.request_order import RequestOrder

Order = Literal["as given", "expected", "known"]

SIZE, ALIKE = 8, 0.6
STEP_MS = ((1, 4.9), (32, 5.17), (128, 6.24), (512, 12.0))  # a 7B policy's, by requests that run


def step_ms(batch: int) -> float:
    for (x, y), (next_x, next_y) in pairwise(STEP_MS):
        if batch <= next_x:
            return y + (next_y - y) * (batch - x) / (next_x - x)
    raise AssertionError(batch)


def draw_lengths(
    num_prompts: int, draw: random.Random, *, median: float = 139, longest: int = 4096
) -> tuple[list[list[int]], list[float]]:
    """Log-normal lengths of each prompt's responses, alike within it, and the means of as many earlier answers."""

    def answers(of_prompt: float) -> list[int]:
        own = [math.sqrt(1 - ALIKE) * draw.gauss(0, 1) for _ in range(SIZE)]
        lengths = [median * math.exp(1.2 * (math.sqrt(ALIKE) * of_prompt + each)) for each in own]
        return [min(longest, max(1, round(length))) for length in lengths]

    prompts = [draw.gauss(0, 1) for _ in range(num_prompts)]
    now = [answers(prompt) for prompt in prompts]
    return now, [mean(answers(prompt)) for prompt in prompts]


class Engine:
    """Decodes requests: `running` has the step in which each ends, `step` is the last one, done at `now` seconds."""

    def __init__(self) -> None:
        self.running: dict[int, int] = {}
        self.step, self.now = 0, 0.0

    def look_ahead(self) -> None:
        """Find the step in which the next of its responses ends, and the second."""
        self.next_step = min(self.running.values(), default=self.step)
        self.next_end = self.now + (self.next_step - self.step) * step_ms(max(1, len(self.running))) / 1e3

    def advance(self) -> list[int]:
        """Decode until then; return what has ended."""
        self.step, self.now = self.next_step, self.next_end
        ended = [i for i, step in self.running.items() if step == self.step]
        for i in ended:
            del self.running[i]
        return ended


class Rollout:
    """A rollout of all prompts.

    Args:
        lengths: Tokens of each prompt's responses.
        shares: Prompts of each engine; a list alone is a queue that all engines share.
        num_engines: Engines.
        history: Mean length of earlier answers to each prompt.
    """

    def __init__(
        self,
        lengths: Sequence[Sequence[int]],
        shares: Sequence[Sequence[int]],
        num_engines: int = 1,
        history: Sequence[float] | None = None,
    ) -> None:
        self.lengths = [length for group in lengths for length in group]
        self.waiting = [[prompt * SIZE + i for prompt in share for i in range(SIZE)] for share in shares]
        self.engines = [Engine() for _ in range(num_engines)]
        self.orders = [RequestOrder() for _ in shares]
        for order, i in ((order, i) for order in self.orders for i in range(len(self.lengths))):
            order.begin(i // SIZE, history[i // SIZE] if history else 0.0)

    def seconds(self, room: int, order: Order) -> float:
        """Return the seconds until the last response has ended."""
        for number in range(len(self.waiting)):
            self._sort(number, order)
        queues = [self._queue(engine) for engine in self.engines]
        for _, queue, engine in sorted((i, q, e) for e, q in enumerate(queues) for i in range(room)):  # in turns
            self._fill(self.engines[engine], queue, len(self.engines[engine].running) + 1)
        for engine in self.engines:
            engine.look_ahead()
        while busy := [engine for engine in self.engines if engine.running]:
            engine = min(busy, key=lambda each: each.next_end)
            queue = self._queue(engine)
            for i in engine.advance():
                self.orders[queue].end(i // SIZE, self.lengths[i])
            if order == "expected" and self.waiting[queue]:
                self._sort(queue, order)
            self._fill(engine, queue, room)
            engine.look_ahead()
        return max(engine.now for engine in self.engines)

    def _queue(self, engine: Engine) -> int:
        return self.engines.index(engine) % len(self.waiting)

    def _fill(self, engine: Engine, queue: int, room: int) -> None:
        while self.waiting[queue] and len(engine.running) < room:
            i = self.waiting[queue].pop(0)
            engine.running[i] = engine.step + self.lengths[i]

    def _sort(self, queue: int, order: Order) -> None:
        waiting = self.waiting[queue]
        if order == "known":
            waiting.sort(key=lambda i: -self.lengths[i])
        elif order == "expected":
            running = defaultdict(list)
            for engine in (each for each in self.engines if self._queue(each) == queue):
                for i, step in engine.running.items():
                    running[i // SIZE].append(self.lengths[i] - step + engine.step)
            places = self.orders[queue].order([i // SIZE for i in waiting], running)
            waiting[:] = [waiting[place] for place in places]
