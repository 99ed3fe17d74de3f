"""Cut an iteration's sequences into the micro-batches of its optimizer steps."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapreplace
from itertools import count, pairwise
from math import ceil

import torch
from torch import Tensor


def cut_micro_batches(rows: Tensor, lengths: Tensor, max_tokens: int, *, is_padded: bool = False) -> list[list[int]]:
    """Cut sequences into micro-batches, largest first, so that a lack of memory shows at once.

    Args:
        rows: Row numbers of the sequences. (N,)
        lengths: Tokens of each sequence of the batch. (B,), int64
        max_tokens: Most tokens of a micro-batch.
        is_padded: Count padding, which a pass has that cannot be packed.

    Returns:
        Row numbers by micro-batch.

    Raises:
        ValueError: A sequence alone has more than `max_tokens`.
    """
    if not len(rows):
        return []
    rows = rows[lengths[rows].argsort(descending=True, stable=True)]
    in_order = lengths[rows].tolist()
    if in_order[0] > max_tokens:
        raise ValueError(f"A sequence has {in_order[0]} tokens, more than `micro_batch_tokens` {max_tokens}; raise it.")
    parts = fill(in_order, max_tokens) if is_padded else balance(in_order, max_tokens)
    return [rows[part].tolist() for part in parts]


def balance(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Divide sequences among the fewest parts of similar size, with which the rule below finds room for all.

    The longest goes first, each into the lightest part: the largest is at most 4/3 of the smallest possible (Graham
    1969, Bounds on Multiprocessing Timing Anomalies).

    Args:
        lengths: Tokens of each sequence, longest first, none above `max_tokens`.
        max_tokens: Most tokens of a part.

    Returns:
        Places in `lengths` by part, largest part first.
    """
    for num_parts in count(ceil(sum(lengths) / max_tokens)):  # as many parts as sequences have room for all
        parts: list[tuple[int, int, list[int]]] = [(0, number, []) for number in range(num_parts)]  # a heap
        for place, length in enumerate(lengths):
            size, number, places = parts[0]
            places.append(place)
            heapreplace(parts, (size + length, number, places))
        if max(parts)[0] <= max_tokens:
            break
    return [places for _, _, places in sorted(parts, reverse=True)]


def fill(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Fill one part after the other up to `max_tokens` padded tokens; otherwise as `balance`."""
    starts = [0]
    for place in range(1, len(lengths)):
        if (place + 1 - starts[-1]) * lengths[starts[-1]] > max_tokens:
            starts.append(place)
    parts = [list(range(*ends)) for ends in pairwise([*starts, len(lengths)])]
    return sorted(parts, key=lambda part: -len(part) * lengths[part[0]])


def plan_minibatches(
    lengths: Tensor, *, micro_batch_tokens: int, num_minibatches: int, generator: torch.Generator, is_padded: bool
) -> list[list[list[int]]]:
    """Split sequences at random into steps, and steps into micro-batches.

    Args:
        lengths: Tokens of each sequence. (B,), int64
        micro_batch_tokens: Most tokens of a micro-batch.
        num_minibatches: Optimizer steps, which divide B.
        generator: Shuffles.
        is_padded: As in `cut_micro_batches`.

    Returns:
        Row numbers by optimizer step and micro-batch, each step's largest one first.
    """
    order = torch.randperm(len(lengths), generator=generator)
    steps = order.chunk(num_minibatches)
    return [cut_micro_batches(rows, lengths, micro_batch_tokens, is_padded=is_padded) for rows in steps]
