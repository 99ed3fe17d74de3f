"""Lay sequences of any length into packs of one constant length.

A pack holds *entries*. Entry `i` of a sequence is what the head reads in one step of drafting, token `i + 1` and the
target's states at `i`, and what it should draft then, the distribution that follows token `i + 1`. A sequence of `n`
tokens has `n - 2` entries: the last token is only ever drafted.
"""

from bisect import bisect_right, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tlt_lightning.arguments import CountOrZero, check_argument
from tlt_lightning.hidden_states import PolicyText
from tlt_lightning.host_copy import copy_alone

PADDING = -1
PACK_MULTIPLE = 128
"""Divisor of every pack's length, which suits every kernel."""
_LARGEST_GAP = 32  # a gap of one 32nd of a pack is padded rather than filled with the torn-off end of a sequence


class Context(NamedTuple):
    """Holds the head's input before a piece of a sequence, wherever the rest of the sequence lies.

    Token `i + 1` of each earlier entry (c,), and the target's states at `i` (c, 3 * H).
    """

    input_ids: Tensor
    states: Tensor


@dataclass(slots=True)
class PackedBatch:
    """Holds entries of several sequences end to end; attention never crosses documents.

    Args:
        input_ids: Token `i + 1` of each entry. (1, T), int64
        next_ids: Token `i + 2`, the one to draft. (1, T), int64
        states: The target's states at `i`, of the drafter's layers. (1, T, 3 * H)
        last_states: Input of the target's final norm at `i + 1`, where `next_ids` is predicted. (1, T, H)
        document_ids: Number of the sequence (or of the piece of one) within the pack, -1 for padding. (1, T), int64
        position_ids: `i`, the position that the engine gives this entry. (1, T), int64
        loss_mask: True where tokens `i + 1` and `i + 2` are one answer's, so that drafting really happens. (1, T), bool
        lengths: Entries of each document, in their order.
        contexts: What each document that is a later piece of a sequence attends to before itself, None for the others.
    """

    input_ids: Tensor
    next_ids: Tensor
    states: Tensor
    last_states: Tensor
    document_ids: Tensor
    position_ids: Tensor
    loss_mask: Tensor
    lengths: tuple[int, ...]
    contexts: tuple[Context | None, ...]


class Piece(NamedTuple):
    """Names entries `start` to `stop` of sequence number `sequence`."""

    sequence: int
    start: int
    stop: int


def num_entries(num_tokens: int) -> int:
    """Count the entries of a sequence of `num_tokens` tokens."""
    return max(0, num_tokens - 2)


def plan_packs(lengths: Sequence[int], num_tokens: int) -> list[list[Piece]]:
    """Distribute sequences of `lengths` tokens over packs of `num_tokens` entries.

    A pack takes the longest sequences that fit whole. The end of the longest remaining one fills the rest. No entry
    loses its context, but at a cut those before it have no drafts beyond it. Only the last pack may be left short.
    """
    rest = sorted((num_entries(length), index) for index, length in enumerate(lengths) if num_entries(length))
    packs = []
    while rest:
        room, pack = num_tokens, []
        while rest:
            fitting = bisect_right(rest, (room, len(lengths))) - 1
            if fitting < 0 and room <= num_tokens // _LARGEST_GAP:
                break
            length, index = rest.pop(fitting)
            start = max(0, length - room)
            pack.append(Piece(index, start, length))
            if start:
                insort(rest, (start, index))
            room -= length - start
        packs.append(pack)
    return packs


def check_num_tokens(num_tokens: int, argument: str = "num_tokens") -> None:
    """Raise ValueError or TypeError, which name the `argument`, unless a pack can have `num_tokens`."""
    check_argument(argument, num_tokens, CountOrZero)
    if not num_tokens or num_tokens % PACK_MULTIPLE:
        raise ValueError(f"`{argument}` must be a positive multiple of {PACK_MULTIPLE}, got {num_tokens}.")


def packs_of(
    sequences: Sequence[PolicyText], num_tokens: int, device: torch.device | None = None
) -> Iterator[PackedBatch]:
    """Yield packs with all of `sequences`, each made when it is asked for; see `fill_pack`.

    Packs have one shape, so that memory and time of a step are known. Pieces of a sequence longer than a pack keep
    their positions. Sequences of fewer than three tokens hold nothing to learn and are left out.
    """
    for plan in plan_packs([len(sequence) for sequence in sequences], num_tokens):
        yield fill_pack([(sequences[piece.sequence], piece) for piece in plan], num_tokens, device)


def _copy(rows: Tensor, place: Tensor) -> None:
    if place.is_cuda:
        place.copy_(rows)
    else:
        copy_alone(rows, place)


def _pinned(rows: Tensor) -> Tensor:
    place = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
    copy_alone(rows, place)
    return place


def fill_pack(
    pieces: Sequence[tuple[PolicyText, Piece]], num_tokens: int, device: torch.device | None = None
) -> PackedBatch:
    """Make a pack of `num_tokens` entries from `pieces`, each with its sequence.

    What goes to a GPU is laid out in page-locked host memory, which PyTorch uses again, so that the host waits for
    none of the device's work. Contexts stay there.
    """
    first = pieces[0][0]
    device = first.states.device if device is None else device
    pins = device.type == "cuda" and not first.states.is_cuda
    ids = torch.zeros(4, num_tokens, dtype=first.input_ids.dtype, device=first.input_ids.device, pin_memory=pins)
    loss_mask = torch.zeros(num_tokens, dtype=torch.bool, device=ids.device, pin_memory=pins)
    states, last_states = (
        torch.empty(num_tokens, part.shape[-1], dtype=part.dtype, device=part.device, pin_memory=pins)
        for part in (first.states, first.last_states)
    )
    input_ids, next_ids, document_ids, position_ids = ids
    document_ids.fill_(PADDING)
    contexts: list[Context | None] = []
    end = 0
    for number, (sequence, (_, start, stop)) in enumerate(pieces):
        here, end = slice(end, end + stop - start), end + stop - start
        input_ids[here] = sequence.input_ids[start + 1 : stop + 1]
        next_ids[here] = sequence.input_ids[start + 2 : stop + 2]
        _copy(sequence.states[start:stop], states[here])
        _copy(sequence.last_states[start + 1 : stop + 1], last_states[here])
        document_ids[here] = number
        position_ids[here] = torch.arange(start, stop, device=ids.device)
        loss_mask[here] = position_ids[here] + 1 >= sequence.prompt_length
        for left, entered in sequence.others:  # of two tokens: the one read, and the one to draft
            loss_mask[here] &= (position_ids[here] + 2 < left) | (position_ids[here] + 1 >= entered)
        before = sequence.input_ids[1 : start + 1], sequence.states[:start]
        contexts.append(Context(*(_pinned(part) if pins else part for part in before)) if start else None)
    states[end:], last_states[end:] = 0, 0
    input_ids, next_ids, document_ids, position_ids = ids.to(device, non_blocking=pins)
    return PackedBatch(
        input_ids=input_ids[None],
        next_ids=next_ids[None],
        states=states[None].to(device, non_blocking=pins),
        last_states=last_states[None].to(device, non_blocking=pins),
        document_ids=document_ids[None],
        position_ids=position_ids[None],
        loss_mask=loss_mask[None].to(device, non_blocking=pins),
        lengths=tuple(stop - start for _, (_, start, stop) in pieces),
        contexts=tuple(contexts),
    )
