"""Prompts dealt to ranks by expected length: against one queue for all engines, simulated."""

import random
from collections import defaultdict
from statistics import mean

import pytest

from tests.support.simulations.engines import Rollout, draw_lengths
from tlt_lightning.schedules.answer_lengths import deal

pytestmark = pytest.mark.slow


def test_ranks_get_equally_many_prompts_and_alike_tokens() -> None:
    shares = deal([800.0, 100.0, 90.0, 110.0, 700.0, 120.0], [3, 3])
    assert shares == [[0, 2, 3], [1, 4, 5]]
    assert deal([5.0, 1.0, 1.0, 1.0], [2, 2]) == [[0, 3], [1, 2]]  # not one against three


def test_ranks_take_turns_where_nothing_is_known() -> None:
    assert deal([0.0] * 6, [3, 3]) == [[0, 2, 4], [1, 3, 5]]


def test_a_rank_gets_its_number_of_prompts() -> None:
    assert deal([0.0] * 7, [3, 2, 2]) == [[0, 3, 6], [1, 4], [2, 5]]
    assert deal([9.0, 1.0, 8.0, 2.0], [3, 0, 1]) == [[0, 1, 3], [], [2]]
    assert deal([], [0, 0]) == [[], []]


def test_an_unknown_prompt_counts_as_the_mean_of_the_others() -> None:
    assert deal([10.0, 0.0, 50.0, 90.0], [2, 2]) == deal([10.0, 50.0, 50.0, 90.0], [2, 2]) == [[0, 3], [1, 2]]


def compare(
    num_ranks: int, per_rank: int, room: int, median: int = 139, longest: int = 4096, num_draws: int = 8
) -> dict[str, float]:
    """Mean seconds of rollouts of `per_rank` prompts a rank, in the order expected from history; docs have 24 draws."""
    found = defaultdict(list)
    num_prompts = num_ranks * per_rank
    everything = range(num_prompts)
    for seed in range(num_draws):
        lengths, history = draw_lengths(num_prompts, random.Random(seed), median=median, longest=longest)
        deals = {
            "dealt": deal(history, [per_rank] * num_ranks),
            "in turns": [everything[rank::num_ranks] for rank in range(num_ranks)],
            "shared": [everything],
        }
        for name, shares in deals.items():
            found[name].append(Rollout(lengths, shares, num_ranks, history).seconds(room, "expected"))
        found["known"].append(Rollout(lengths, [everything], num_ranks).seconds(room, "known"))
    return {name: mean(seconds) for name, seconds in found.items()}


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param((4, 16, 32, 2500, 32768), id="long texts, room for a quarter"),
        pytest.param((8, 8, 16, 600, 8192), id="few prompts a rank, room for a quarter"),
    ],
)
def test_a_shared_queue_would_gain_less_than_a_twentieth_over_what_is_dealt(sizes: tuple[int, ...]) -> None:
    seconds = compare(*sizes)
    assert seconds["dealt"] < 1.05 * seconds["shared"]
    assert seconds["in turns"] > 1.05 * seconds["shared"]


@pytest.mark.parametrize(
    ("sizes", "gain"),
    [
        ((4, 16, 32, 2500, 32768), 0.048),
        ((8, 8, 16, 600, 8192), 0.120),
        ((4, 16, 32, 139, 4096), 0.017),
        ((4, 16, 16, 2500, 32768), 0.150),  # room for an eighth
        ((8, 8, 8, 600, 8192), 0.245),
    ],
)
def test_in_a_first_pass_a_shared_queue_would_gain_what_the_docs_say(sizes: tuple[int, ...], gain: float) -> None:
    num_ranks, per_rank, room, median, longest = sizes
    everything, seconds = range(num_ranks * per_rank), defaultdict(list)
    turns = [everything[rank::num_ranks] for rank in range(num_ranks)]
    for seed in range(24):
        lengths, _ = draw_lengths(len(everything), random.Random(seed), median=median, longest=longest)
        for name, shares in (("in turns", turns), ("shared", [everything])):
            seconds[name].append(Rollout(lengths, shares, num_ranks).seconds(room, "expected"))
    assert mean(seconds["in turns"]) / mean(seconds["shared"]) - 1 == pytest.approx(gain, abs=0.002)


def test_where_room_is_short_it_is_nearly_as_good_as_known_lengths() -> None:
    seconds = compare(4, 16, room=32)
    assert seconds["dealt"] < 1.05 * seconds["known"]


def test_where_all_fit_nothing_is_lost() -> None:
    seconds = compare(4, 8, room=64)
    assert seconds["dealt"] < 1.005 * min(seconds.values())
