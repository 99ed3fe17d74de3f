"""Cut an iteration's sequences into the micro-batches of its optimizer steps."""

from collections.abc import Callable, Sequence
from functools import reduce
from heapq import heapreplace
from itertools import count, pairwise
from math import ceil

import torch
from torch import Tensor


def cut_micro_batches(
    rows: Tensor, lengths: Tensor, max_tokens: int, *, is_padded: bool = False, num_parts: int = 1
) -> list[list[int]]:
    """Cut sequences into micro-batches, largest first, so that a lack of memory shows at once.

    Args:
        rows: Row numbers of the sequences. (N,)
        lengths: Tokens of each sequence of the batch. (B,), int64
        max_tokens: Most tokens of a micro-batch.
        is_padded: Count padding, which a pass has that cannot be packed.
        num_parts: Fewest micro-batches, at most as many as sequences.

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
    parts = (fill_padded if is_padded else balance)(in_order, max_tokens, num_parts)
    return [rows[part].tolist() for part in parts]


def balance(lengths: Sequence[int], max_tokens: int, num_parts: int = 1) -> list[list[int]]:
    """Divide sequences among parts of similar size, as few as the rule below can keep within `max_tokens`.

    The longest sequence goes first, and each into the part with the fewest tokens: the largest part then has at most
    4/3 of the tokens of the best division's (Graham 1969, Bounds on Multiprocessing Timing Anomalies).

    Args:
        lengths: Tokens of each sequence, longest first, none above `max_tokens`.
        max_tokens: Most tokens of a part.
        num_parts: Fewest parts.

    Returns:
        Places in `lengths` by part, largest part first.
    """
    for tried in count(max(num_parts, ceil(sum(lengths) / max_tokens))):  # as many parts as sequences have room
        parts: list[tuple[int, int, list[int]]] = [(0, number, []) for number in range(tried)]  # a heap
        for place, length in enumerate(lengths):
            size, number, places = parts[0]
            places.append(place)
            heapreplace(parts, (size + length, number, places))
        if max(parts)[0] <= max_tokens:
            break
    return [places for _, _, places in sorted(parts, reverse=True)]


def fill_padded(lengths: Sequence[int], max_tokens: int, num_parts: int = 1) -> list[list[int]]:
    """Fill one part after the other up to `max_tokens` padded tokens, then halve; otherwise as `balance`."""
    starts = [0]
    for place in range(1, len(lengths)):
        if (place + 1 - starts[-1]) * lengths[starts[-1]] > max_tokens:
            starts.append(place)
    parts = [list(range(*ends)) for ends in pairwise([*starts, len(lengths)])]
    while len(parts) < num_parts:
        most = parts.pop(max(range(len(parts)), key=lambda number: len(parts[number])))
        parts += [most[: len(most) // 2], most[len(most) // 2 :]]
    return sorted(parts, key=lambda part: -len(part) * lengths[part[0]])


LargestCounts = Callable[[Tensor], Tensor]
"""Returns the largest of every rank's counts, for each place of a tensor; a collective."""


def cut_alike(
    steps: Sequence[Tensor], lengths: Tensor, max_tokens: int, *, is_padded: bool, largest_counts: LargestCounts | None
) -> list[list[list[int]]]:
    """Cut each of some steps as `cut_micro_batches` does, into as many parts on every rank.

    A rank that is to cut more finely may need still more parts, so ranks ask again until nobody does: in the end every
    sequence would be a part of its own.

    Args:
        steps: Row numbers of each step's sequences.
        lengths: Tokens of each sequence of the batch. (B,), int64
        max_tokens: Most tokens of a micro-batch.
        is_padded: As in `cut_micro_batches`.
        largest_counts: Tells of the other ranks; None where each may cut by itself.

    Returns:
        Row numbers by step and micro-batch, each step's largest one first.
    """
    least = torch.ones(len(steps), dtype=torch.int64)
    while True:
        plan = [
            cut_micro_batches(rows, lengths, max_tokens, is_padded=is_padded, num_parts=num_parts)
            for rows, num_parts in zip(steps, least.tolist(), strict=True)
        ]
        counts = torch.tensor([len(step) for step in plan])
        if largest_counts is None or torch.equal(most := largest_counts(counts), least):
            return plan
        least = most


def end_step(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the sums of the metrics of a step's micro-batches, or their largest (`_max`); empty their list."""
    names, zero = set().union(*parts), torch.zeros(())
    metrics = {
        name: reduce(torch.maximum if name.endswith("_max") else torch.add, [part.get(name, zero) for part in parts])
        for name in names
    }
    parts.clear()
    return metrics
