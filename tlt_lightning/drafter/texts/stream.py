"""Lay the texts of an epoch end to end, and cut the stream into packs as it is read."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tlt_lightning.data.formats import Text
from tlt_lightning.drafter.packing import PackedBatch, Piece, fill_pack, num_entries
from tlt_lightning.drafter.texts.states import StateReader
from tlt_lightning.hidden_states import PolicyText


@dataclass(eq=False)
class PackStream:
    """Yields the packs of one epoch on this rank, each computed when it is asked for.

    The texts, in another order each epoch if shuffled, lie end to end; a pack begins where the one before it ends. So
    the pieces of a text follow one another, and the target reads it once, but for one at the border of two ranks, which
    both read: its states are held until its last piece is in a pack. There are as many packs in every order.

    Args:
        texts: Those of all ranks.
        reader: Reads their states.
        num_tokens: Length of a pack.
        rank: Takes its share of the stream.
        num_ranks: Ranks that share it.
        begin_epoch: Returns the seed of the epoch's order, and the packs that a resumed run has had of it; None keeps
            the texts in their order.
    """

    texts: Sequence[Text]
    reader: StateReader
    num_tokens: int
    rank: int
    num_ranks: int
    begin_epoch: Callable[[], tuple[str, int]] | None = None

    def __post_init__(self) -> None:
        self.lengths = [len(text.ids) for text in self.texts]
        num_packs = -(-sum(map(num_entries, self.lengths)) // self.num_tokens)
        self._num_packs = num_packs // self.num_ranks
        if not self._num_packs:
            raise ValueError(
                f"`completions` to {'learn from' if self.begin_epoch else 'hold out'} fill {num_packs} packs of "
                f"`num_tokens` {self.num_tokens}, fewer than there are ranks ({self.num_ranks}); give more, or shorter "
                "packs, or change `val_share`."
            )

    def __len__(self) -> int:
        return self._num_packs

    def __iter__(self) -> Iterator[PackedBatch]:
        held: dict[int, PolicyText] = {}
        for plan in self._plans():
            rows = [piece.sequence for piece in plan]
            missing = [row for row in rows if row not in held]
            held |= zip(missing, self.reader.read([self.texts[row] for row in missing]), strict=True)
            yield fill_pack([(held[piece.sequence], piece) for piece in plan], self.num_tokens)
            last = plan[-1]
            goes_on = last.stop < num_entries(self.lengths[last.sequence])
            held = {last.sequence: held[last.sequence]} if goes_on else {}

    def _plans(self) -> Iterator[list[Piece]]:
        """Yield the pieces of each of this rank's packs."""
        order, num_before = list(range(len(self.texts))), 0
        if self.begin_epoch is not None:
            seed, num_before = self.begin_epoch()
            random.Random(seed).shuffle(order)
        num_before = min(num_before, self._num_packs)  # which may have been more
        first = self.rank * self._num_packs + num_before
        yield from cut_stream(self.lengths, order, self.num_tokens, first, self._num_packs - num_before)


def cut_stream(
    lengths: Sequence[int], order: Sequence[int], num_tokens: int, first: int, count: int
) -> Iterator[list[Piece]]:
    """Yield the pieces of up to `count` packs, from number `first` on, of sequences that lie end to end.

    Args:
        lengths: Tokens of each sequence.
        order: Their order.
        num_tokens: Entries of a pack; the last of all packs may be left short.
        first: Number of the first pack, from 0.
        count: Most packs.
    """
    plan: list[Piece] = []
    skipped, room = first * num_tokens, num_tokens
    for sequence in order:
        length = num_entries(lengths[sequence])
        start = min(skipped, length)
        skipped -= start
        while start < length and count:
            stop = min(length, start + room)
            plan.append(Piece(sequence, start, stop))
            start, room = stop, room - (stop - start)
            if not room:
                yield plan
                plan, room, count = [], num_tokens, count - 1
    if plan and count:
        yield plan
