"""Turn rollouts into tensors, and an iteration's batch into the minibatches of its steps."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from math import ceil

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tlt_lightning.data.batch import Rollout, RolloutBatch


def collate(rollouts: Sequence[Rollout], *, pad_id: int, temperature: float) -> RolloutBatch:
    """Build the batch of `rollouts`, on the CPU, sequences right-padded with `pad_id`."""
    sequences = [torch.tensor([*rollout.prompt.ids, *rollout.response.token_ids]) for rollout in rollouts]
    logps = [torch.tensor(list(rollout.response.logps), dtype=torch.float32) for rollout in rollouts]
    return RolloutBatch(
        input_ids=pad_sequence(sequences, batch_first=True, padding_value=pad_id),
        prompt_lengths=torch.tensor([len(rollout.prompt.ids) for rollout in rollouts]),
        response_mask=pad_sequence([torch.ones_like(part) for part in logps], batch_first=True),
        rollout_logps=pad_sequence(logps, batch_first=True),
        rewards=torch.tensor([rollout.reward for rollout in rollouts], dtype=torch.float32),
        groups=torch.tensor([rollout.group for rollout in rollouts]),
        policy_versions=torch.tensor([rollout.response.policy_versions[0] for rollout in rollouts]),
        response_lengths=torch.tensor([len(part) for part in logps]),
        truncated=torch.tensor([rollout.is_truncated for rollout in rollouts]),
        temperature=temperature,
    )


def split_by_tokens(lengths: Sequence[int], num_parts: int) -> list[range]:
    """Cut sequences into parts of similar length, the largest as small as can be.

    The size of a part is its rows times its longest sequence. A pass takes memory by it, and time by it plus a
    constant. So the longest sequences run with few others, and many short ones share a pass. Where fewer parts would do
    for that limit, parts are cut on where it saves the most padding.

    Args:
        lengths: Tokens of each sequence, longest first.
        num_parts: Parts to cut, none of them empty.

    Returns:
        Places in `lengths` by part, longest first.

    Raises:
        ValueError: There are fewer sequences than parts, or no parts.
    """
    if not 1 <= num_parts <= len(lengths):
        raise ValueError(f"`num_parts` must be 1 to {len(lengths)}, the number of sequences, got {num_parts}.")
    longest, equal_counts = lengths[0], lengths[0] * ceil(len(lengths) / num_parts)  # bounds of the limit
    limit = bisect_left(
        range(equal_counts), True, lo=longest, key=lambda tokens: len(_fill(lengths, tokens)) <= num_parts
    )
    parts = _fill(lengths, limit)
    while len(parts) < num_parts:
        parts = _cut_once_more(lengths, parts)
    return parts


def _fill(lengths: Sequence[int], limit: int) -> list[range]:
    """Fill one part after the other up to `limit` padded tokens: the fewest parts within it."""
    starts = [0]
    for row in range(1, len(lengths)):
        if (row + 1 - starts[-1]) * lengths[starts[-1]] > limit:
            starts.append(row)
    return [range(*ends) for ends in pairwise([*starts, len(lengths)])]


def _cut_once_more(lengths: Sequence[int], parts: Sequence[range]) -> list[range]:
    """Cut the part where it saves the most padded tokens; among equals, into the evenest halves."""
    cuts = [
        ((part.stop - row) * (lengths[part.start] - lengths[row]), min(row - part.start, part.stop - row), number, row)
        for number, part in enumerate(parts)
        for row in part[1:]
    ]
    *_, number, row = max(cuts)
    part = parts[number]
    return [*parts[:number], range(part.start, row), range(row, part.stop), *parts[number + 1 :]]


def cut_micro_batches(rows: Tensor, lengths: Tensor, micro_batch_size: int) -> list[list[int]]:
    """Cut sequences into micro-batches, largest first, so that a lack of memory shows at once.

    Args:
        rows: Row numbers of the sequences. (N,)
        lengths: Tokens of each sequence of the batch. (B,), int64
        micro_batch_size: Sequences in a micro-batch, on average.

    Returns:
        Row numbers by micro-batch, `N / micro_batch_size` of them, rounded up.
    """
    if not len(rows):
        return []
    rows = rows[lengths[rows].argsort(descending=True, stable=True)]
    in_order = lengths[rows].tolist()
    parts = split_by_tokens(in_order, ceil(len(rows) / micro_batch_size))
    parts.sort(key=lambda part: len(part) * in_order[part.start], reverse=True)
    return [rows[part.start : part.stop].tolist() for part in parts]


def plan_minibatches(
    lengths: Tensor, *, micro_batch_size: int, num_steps: int, generator: torch.Generator
) -> list[list[list[int]]]:
    """Split sequences at random into steps, and steps into micro-batches of similar length.

    Args:
        lengths: Tokens of each sequence. (B,), int64
        micro_batch_size: Sequences in a micro-batch, on average.
        num_steps: Optimizer steps; `num_steps * micro_batch_size` must divide B.
        generator: Shuffles.

    Returns:
        Row numbers by optimizer step and micro-batch, equally many micro-batches in each step, its largest one first.
    """
    order = torch.randperm(len(lengths), generator=generator)
    return [cut_micro_batches(rows, lengths, micro_batch_size) for rows in order.chunk(num_steps)]
