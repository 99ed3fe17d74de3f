"""Remember how long earlier answers to a prompt were, and deal prompts to ranks by it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import chain

Lengths = Sequence[tuple[int, int]]
"""Number of a prompt and tokens of a response to it, for every response."""


@dataclass
class AnswerLengths:
    """Remembers the mean length of the last answers to each prompt, the same on all ranks.

    The dictionary is replaced and never changed, so that an iteration can save what there was when it began.
    """

    means: dict[int, float] = field(default_factory=dict)

    def learn(self, lengths: Lengths, gather: Callable[[Lengths], Sequence[Lengths]]) -> None:
        """Take an iteration's lengths, in place of older ones.

        Args:
            lengths: Those of this rank.
            gather: Returns those of all ranks, in their order; a collective.
        """
        found: dict[int, list[int]] = {}
        for prompt, length in chain.from_iterable(gather(lengths)):
            found.setdefault(prompt, []).append(length)
        self.means = self.means | {prompt: sum(each) / len(each) for prompt, each in found.items()}


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
