"""Longest expected first, simulated on one engine: room for a part of the requests, or for all."""

import random
from collections import defaultdict
from statistics import mean

from tests.support.simulations.engines import Rollout, draw_lengths
from tlt_lightning.engine.request_order import RequestOrder


def compare(num_prompts: int, room: int) -> dict[str, float]:
    """Mean seconds of a dozen rollouts by order."""
    found = defaultdict(list)
    for seed in range(12):
        lengths, history = draw_lengths(num_prompts, random.Random(seed))
        queue = [range(num_prompts)]
        found["as given"].append(Rollout(lengths, queue).seconds(room, "as given"))
        found["known"].append(Rollout(lengths, queue).seconds(room, "known"))
        found["history"].append(Rollout(lengths, queue, history=history).seconds(room, "expected"))
        found["siblings"].append(Rollout(lengths, queue).seconds(room, "expected"))
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
    assert order.order([0, 1, -1, 2, -2], {0: [10], 1: [40]}) == [2, 4, 1, 3, 0]  # what probes new weights comes first
    order.end(0, 200)
    assert order.order([0, 1, 2], {1: [40]}) == [0, 1, 2]


def test_a_group_is_known_while_it_has_requests() -> None:
    order = RequestOrder()
    for _ in range(3):
        order.begin(0, 50.0)
    order.end(0, 80)
    order.end(0, None)  # stopped: its length tells nothing
    assert order.expected(0, []) == (2 * 50 + 80) / 3
    assert order.expected(0, [10, 60]) == (2 * 50 + 80 + 80 + 120) / 5
    order.end(0, 90)
    assert not any(vars(order).values())
