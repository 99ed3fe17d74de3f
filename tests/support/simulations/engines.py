"""A model of dispatch: engines with room for some requests, which they take from a queue each or from one of all."""

import math
import random
from collections import defaultdict
from collections.abc import Sequence
from itertools import chain, pairwise
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
    """Decodes some requests; `running` counts the tokens of each, `now` the seconds."""

    def __init__(self) -> None:
        self.running: dict[int, int] = {}
        self.now = 0.0


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
        for order, (group, length) in ((order, known) for order in self.orders for known in enumerate(history or ())):
            order.begin(group, length)

    def seconds(self, room: int, order: Order) -> float:
        """Return the seconds until the last response has ended."""
        for number in range(len(self.waiting)):
            self._sort(number, order)
        queues = [self._queue(engine) for engine in self.engines]
        for _, queue, engine in sorted((i, q, e) for e, q in enumerate(queues) for i in range(room)):  # in turns
            if self.waiting[queue]:
                self.engines[engine].running[self.waiting[queue].pop(0)] = 0
        while busy := [engine for engine in self.engines if engine.running]:
            engine = min(busy, key=self._end)
            self._advance(engine)
            queue = self._queue(engine)
            self._sort(queue, order)
            while self.waiting[queue] and len(engine.running) < room:
                engine.running[self.waiting[queue].pop(0)] = 0
        return max(engine.now for engine in self.engines)

    def _queue(self, engine: Engine) -> int:
        return self.engines.index(engine) % len(self.waiting)

    def _left(self, engine: Engine) -> int:
        return min(self.lengths[i] - tokens for i, tokens in engine.running.items())

    def _end(self, engine: Engine) -> float:
        return engine.now + self._left(engine) * step_ms(len(engine.running)) / 1e3

    def _advance(self, engine: Engine) -> None:
        """Decode until the first of the engine's responses ends."""
        tokens, engine.now = self._left(engine), self._end(engine)
        for i in [*engine.running]:
            engine.running[i] += tokens
            if engine.running[i] == self.lengths[i]:
                self.orders[self._queue(engine)].end(i // SIZE, engine.running.pop(i))

    def _sort(self, queue: int, order: Order) -> None:
        waiting = self.waiting[queue]
        if order == "known":
            waiting.sort(key=lambda i: -self.lengths[i])
        elif order == "expected":
            running = defaultdict(list)
            for i, tokens in chain.from_iterable(e.running.items() for e in self.engines if self._queue(e) == queue):
                running[i // SIZE].append(tokens)
            places = self.orders[queue].order([i // SIZE for i in waiting], running)
            waiting[:] = [waiting[place] for place in places]
