"""Deal an iteration's prompts to the ranks by the lengths expected of their responses. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush


def deal(lengths: Sequence[float], numbers: Sequence[int]) -> list[list[int]]:
    """Deal prompts so that ranks write and train on about equally many tokens, as far as their numbers allow.

    The longest goes first, each to the rank with the fewest tokens. Where nothing is known, ranks take turns.

    Args:
        lengths: Tokens to expect of a response to each prompt; 0 if unknown, which counts as the mean of the others.
        numbers: Prompts that each rank gets, all of them together.

    Returns:
        Places in `lengths` of each rank's prompts, ascending.
    """
    known = [length for length in lengths if length]
    typical = sum(known) / len(known) if known else 1.0
    expected = [length or typical for length in lengths]
    shares: list[list[int]] = [[] for _ in numbers]
    lightest = [(0.0, rank) for rank, number in enumerate(numbers) if number]  # a heap, as it is sorted
    for place in sorted(range(len(expected)), key=lambda place: -expected[place]):
        num_tokens, rank = heappop(lightest)
        shares[rank].append(place)
        if len(shares[rank]) < numbers[rank]:
            heappush(lightest, (num_tokens + expected[place], rank))
    return [sorted(share) for share in shares]
