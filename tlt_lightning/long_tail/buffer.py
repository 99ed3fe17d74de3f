"""Keep the policy's hidden states between iterations, bounded in bytes.

Unlike TLT's DataBuffer: the bound is in bytes and is kept; the end of a training session clears nothing; sequences are
whole, not their last 512 tokens; held-out prompts are never trained on.
"""

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from tlt_lightning.arguments import Count, Share, checked
from tlt_lightning.drafter.packing import num_entries
from tlt_lightning.hidden_states import HiddenStateRequest, PolicyText, choose_rows

log = logging.getLogger(__name__)

FEWEST = 8
"""Texts that judge a drafter where a few come at a time: the error of a gain on two hides all but a large one."""


class DrafterBuffer:
    """Holds the newest iteration's sequences, and long ones of the iteration before.

    Where an iteration ends early in the long tail or keeps only some rows, long ones of the iteration before stand in
    (TLT's one-step offset sampling). Siblings of one prompt say much the same, so held-out sequences share no prompt
    with training ones. A prompt's hash alone decides, so one that returns in another iteration is held out again: but
    where fewer than two are, the next ones are, too.

    Args:
        max_bytes: Most bytes held in all; a 7B policy takes 28.7 kB a token (4 vectors of 3584 in bfloat16).
        held_out_share: Share of all prompts that is only evaluated on; 0 holds none out. Text of these prompts decides
            on publication; with a tenth of little text, chance would.
        previous_share: Share of the bytes for training that the previous iteration's longest sequences may take from
            the newest, besides what the newest leaves over.

    Example:
        >>> buffer = DrafterBuffer(max_bytes=2 << 30)
        >>> buffer.add(sequences)  # doctest: +SKIP
        >>> packs = packs_of(buffer.sample(65_536, torch.Generator()), 4096, torch.device("cpu"))  # doctest: +SKIP
    """

    @checked()
    def __init__(self, max_bytes: Count, held_out_share: Share = 0.25, previous_share: Share = 0.25) -> None:
        self.max_bytes, self.held_out_share, self.previous_share = max_bytes, held_out_share, previous_share
        self.clear()

    def clear(self) -> None:
        """Drop everything."""
        self._newest: list[PolicyText] = []
        self._previous: list[PolicyText] = []
        self._held_out: list[PolicyText] = []

    def __len__(self) -> int:
        return len(self._newest) + len(self._previous)

    @property
    def training(self) -> list[PolicyText]:
        """Sequences to train on: the newest iteration's, then the previous one's."""
        return self._newest + self._previous

    @property
    def held_out(self) -> list[PolicyText]:
        """Sequences of the newest iteration that are never trained on."""
        return list(self._held_out)

    @property
    def num_tokens(self) -> int:
        """Tokens to train on."""
        return sum(map(len, self.training))

    def add(self, sequences: Sequence[PolicyText], *, come_again: bool = False) -> None:
        """Take one iteration's sequences; keep long ones of the iteration before, and none older.

        Some of every length are kept where not all fit, as those of `request` do; those too short for a draft are
        dropped. No sequences change nothing. With a single prompt, sequences of it are held out. Texts that
        `come_again` among others are held out by their own hash alone, however few that are; up to `FEWEST` of earlier
        ones stay in their place. Tensors must not be views of larger ones, or the bound would not hold.
        """
        sequences = [sequence for sequence in sequences if num_entries(len(sequence))]
        if not sequences:
            return
        keys = list(map(text_key, sequences)) if come_again else keys_of(sequences)
        held = (_below if come_again else _hold_out)(keys, self.held_out_share)
        newest = [sequence for sequence, key in zip(sequences, keys, strict=True) if key not in held]
        held_out = [sequence for sequence, key in zip(sequences, keys, strict=True) if key in held]
        if come_again:
            earlier = [sequence for sequence in self._held_out if text_key(sequence) not in held]
            held_out = [*held_out, *earlier][: max(FEWEST, len(held_out))]
        previous = [sequence for sequence in self._newest if not held & {prompt_key(sequence), text_key(sequence)}]
        self._fill(newest, previous, held_out)
        if newest and not self._newest:
            shortest = min(sequence.nbytes for sequence in newest)
            log.warning(
                "None of an iteration's %d sequences fits the drafter's buffer: the shortest has %d bytes, `max_bytes`"
                " is %d. Raise it, or the drafter learns nothing from this iteration.",
                *(len(newest), shortest, self.max_bytes),
            )

    def request(self, layer_ids: tuple[int, ...], hidden_size: int, share: float, seed: int) -> HiddenStateRequest:
        """Request states of the tokens that fit, at most `share` of an iteration and the held-out."""
        bytes_per_token = 4 * 2 * hidden_size + 8  # four bfloat16 states, and the token
        max_tokens = (self.max_bytes - self._previous_bytes) // bytes_per_token
        return HiddenStateRequest(layer_ids, max_tokens, share / (1 - self.held_out_share), seed)

    @property
    def _previous_bytes(self) -> int:
        """Bytes that the previous iteration may take from the newest."""
        return int(self.previous_share * (1 - self.held_out_share) * self.max_bytes)

    def sample(self, num_tokens: int, generator: torch.Generator) -> list[PolicyText]:
        """Draw whole sequences of all lengths, all equally likely, none twice before each came once.

        The sequences have `num_tokens` together on average, and one is drawn at least. The order is random. These are
        the objects that the buffer holds, so do not change them.
        """
        pool = sorted(self.training, key=len)
        if not pool:
            raise RuntimeError("The drafter's buffer has nothing to train on; `add` an iteration's sequences first.")
        passes, rest = divmod(max(1, round(num_tokens * len(pool) / self.num_tokens)), len(pool))
        rows = list(range(len(pool))) * passes + _spread(len(pool), rest, generator)
        return [pool[rows[index]] for index in torch.randperm(len(rows), generator=generator).tolist()]

    def state_dict(self) -> dict[str, Any]:
        """Return everything held, as dictionaries of tensors and integers; no copies."""
        return {
            name: [{item.name: getattr(sequence, item.name) for item in fields(sequence)} for sequence in part]
            for name, part in (("newest", self._newest), ("previous", self._previous), ("held_out", self._held_out))
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` saved, as far as it fits into `max_bytes`."""
        parts = {name: [PolicyText(**values) for values in part] for name, part in state_dict.items()}
        self._fill(parts["newest"], parts["previous"], parts["held_out"])

    def _fill(
        self, newest: Sequence[PolicyText], previous: Sequence[PolicyText], held_out: Sequence[PolicyText]
    ) -> None:
        """Hold what fits of each part; parts that this method chose before stay as they are."""
        # Something must be held out, or nobody can tell whether the drafter improves.
        smallest = min((sequence.nbytes for sequence in held_out), default=0)
        left_over = self.max_bytes - _total_bytes(newest)
        bound = min(max(int(self.held_out_share * self.max_bytes), smallest, left_over), self.max_bytes)
        self._held_out = _fitting(held_out, bound)
        free = self.max_bytes - _total_bytes(self._held_out)
        self._previous = _longest(previous, min(max(self._previous_bytes, free - _total_bytes(newest)), free))
        self._newest = _fitting(newest, free - _total_bytes(self._previous))


def keys_of(sequences: Sequence[PolicyText]) -> list[bytes]:
    """Return a key of each sequence: of its prompt, or of its text if all have one prompt."""
    keys = [prompt_key(sequence) for sequence in sequences]
    return keys if len(set(keys)) > 1 else [text_key(sequence) for sequence in sequences]


def _hold_out(keys: Sequence[bytes], share: float) -> set[bytes]:
    """Choose the held-out keys: those below `share` of all hashes, whichever others are there.

    Two at least of four or more: a single one leaves the error of a gain unknown.
    """
    distinct = sorted(set(keys))
    least = 2 if len(distinct) >= 4 else 1
    return set(distinct[: min(max(least, len(_below(keys, share))), len(distinct) - 1)]) if share else set()


def _below(keys: Sequence[bytes], share: float) -> set[bytes]:
    """Return the keys below `share` of all hashes."""
    return {key for key in keys if int.from_bytes(key) < share * 2 ** (8 * len(key))}


def prompt_key(sequence: PolicyText) -> bytes:
    """Return a key of the sequence's prompt."""
    return _hash(sequence.input_ids[: sequence.prompt_length])


def text_key(sequence: PolicyText) -> bytes:
    """Return a key of the whole sequence."""
    return _hash(sequence.input_ids)


def _hash(ids: Tensor) -> bytes:
    return hashlib.blake2b(ids.cpu().numpy().tobytes(), digest_size=16).digest()


def _fitting(sequences: Sequence[PolicyText], max_bytes: int) -> list[PolicyText]:
    """Return sequences that fit, in their order: all, or some of every length."""
    sizes = [sequence.nbytes for sequence in sequences]
    return [sequences[row] for row in choose_rows(sizes, max_bytes, torch.Generator().manual_seed(0))]


def _longest(sequences: Sequence[PolicyText], max_bytes: int) -> list[PolicyText]:
    """Return the longest sequences that fit, the longest first."""
    kept: list[PolicyText] = []
    for sequence in sorted(sequences, key=len, reverse=True):
        if sequence.nbytes <= max_bytes:
            kept.append(sequence)
            max_bytes -= sequence.nbytes
    return kept


def _spread(num_rows: int, num_drawn: int, generator: torch.Generator) -> list[int]:
    """Draw rows in equal steps from a random start: all equally likely, none twice."""
    if num_drawn == 0:
        return []
    step = num_rows / num_drawn
    # Rows swap places within a step; without it the same ones would always be drawn together.
    places = torch.arange(num_rows) + step * torch.rand(num_rows, generator=generator)
    start = torch.rand((), generator=generator).item()
    order = places.argsort().tolist()
    return [order[int((index + start) * step)] for index in range(num_drawn)]


def _total_bytes(sequences: Sequence[PolicyText]) -> int:
    return sum(sequence.nbytes for sequence in sequences)
