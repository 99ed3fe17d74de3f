"""Longest expected first, simulated: room for a part of the requests, or for all."""

import math
import random
from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from statistics import mean

from tlt_lightning.engine.request_order import RequestOrder

Answers = list[tuple[int, int]]  # group and tokens of each request
Order = Callable[[list[int], dict[int, int]], list[int]]

LONGEST, SIZE, ALIKE = 4096, 8, 0.6
STEP_MS = ((1, 4.9), (32, 5.17), (128, 6.24), (512, 12.0))  # a 7B policy's, by requests that run


def step_ms(batch: int) -> float:
    for (x, y), (next_x, next_y) in pairwise(STEP_MS):
        if batch <= next_x:
            return y + (next_y - y) * (batch - x) / (next_x - x)
    raise AssertionError(batch)


def draw_answers(num_prompts: int, draw: random.Random) -> tuple[Answers, dict[int, float]]:
    """Log-normal lengths, alike within a group, and the means of as many earlier answers."""

    def answers(of_prompt: float) -> list[int]:
        own = [math.sqrt(1 - ALIKE) * draw.gauss(0, 1) for _ in range(SIZE)]
        lengths = [139 * math.exp(1.2 * (math.sqrt(ALIKE) * of_prompt + each)) for each in own]
        return [min(LONGEST, max(1, round(length))) for length in lengths]

    prompts = [draw.gauss(0, 1) for _ in range(num_prompts)]
    now = [(group, length) for group, prompt in enumerate(prompts) for length in answers(prompt)]
    return now, {group: mean(answers(prompt)) for group, prompt in enumerate(prompts)}


class Rollout:
    """An engine that decodes at most `room` requests at once."""

    def __init__(self, answers: Answers, history: dict[int, float] | None = None) -> None:
        self.answers, self.order = answers, RequestOrder()
        for group, length in (history or {}).items():
            self.order.begin(group, length)

    def expected(self, waiting: list[int], running: dict[int, int]) -> list[int]:
        by_group = defaultdict(list)
        for i, tokens in running.items():
            by_group[self.answers[i][0]].append(tokens)
        return [waiting[place] for place in self.order.order([self.answers[i][0] for i in waiting], by_group)]

    def known(self, waiting: list[int], running: dict[int, int]) -> list[int]:
        return sorted(waiting, key=lambda i: -self.answers[i][1])

    def seconds(self, room: int, order: Order | None) -> float:
        waiting, running, now = [*range(len(self.answers))], dict[int, int](), 0.0
        while waiting or running:
            if waiting and len(running) < room:
                waiting = waiting if order is None else order(waiting, running)
                while waiting and len(running) < room:
                    running[waiting.pop(0)] = 0
            tokens = min(self.answers[i][1] - done for i, done in running.items())
            now += tokens * step_ms(len(running)) / 1e3
            for i in [*running]:
                running[i] += tokens
                if running[i] == self.answers[i][1]:
                    del running[i]
                    self.order.end(*self.answers[i])
        return now


def compare(num_prompts: int, room: int) -> dict[str, float]:
    """Mean seconds of a dozen rollouts by order."""
    found = defaultdict(list)
    for seed in range(12):
        answers, history = draw_answers(num_prompts, random.Random(seed))
        found["as given"].append(Rollout(answers).seconds(room, None))
        known = Rollout(answers)
        found["known"].append(known.seconds(room, known.known))
        for name, means in (("history", history), ("siblings", None)):
            rollout = Rollout(answers, means)
            found[name].append(rollout.seconds(room, rollout.expected))
    return {name: mean(seconds) for name, seconds in found.items()}


def test_history_is_nearly_as_good_as_known_lengths_and_siblings_help_without_it() -> None:
    seconds = compare(32, room=32)
    assert seconds["history"] < 1.05 * seconds["known"]
    assert seconds["history"] < 0.9 * seconds["as given"]
    assert seconds["siblings"] < 0.97 * seconds["as given"]


def test_where_all_fit_nothing_is_lost() -> None:
    seconds = compare(16, room=128)
    assert len({round(each, 9) for each in seconds.values()}) == 1


def test_unknown_prompts_start_one_request_each_and_then_the_longest() -> None:
    order = RequestOrder()
    order.begin(2, 50.0)
    assert order.order([0, 0, 1, 1, 2], {}) == [0, 2, 4, 1, 3]
    assert order.order([0, 1, 2], {0: [10], 1: [40]}) == [1, 2, 0]
    order.end(0, 200)
    assert order.order([0, 1, 2], {1: [40]}) == [0, 1, 2]
