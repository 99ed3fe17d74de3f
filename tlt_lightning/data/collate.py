"""From rollouts to tensors, and from an iteration's batch to the minibatches of its optimizer steps."""

from __future__ import annotations

from collections.abc import Sequence

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
        truncated=torch.tensor([rollout.is_truncated for rollout in rollouts]),
        temperature=temperature,
    )


def plan_minibatches(
    lengths: Tensor, *, micro_batch_size: int, num_steps: int, generator: torch.Generator
) -> list[list[list[int]]]:
    """Split sequences at random into optimizer steps, and each step into micro-batches of similar length.

    Args:
        lengths: Tokens of each sequence. (B,)
        micro_batch_size: Sequences in a micro-batch.
        num_steps: Optimizer steps; `num_steps * micro_batch_size` must divide B.
        generator: Shuffles.

    Returns:
        Row numbers by optimizer step and micro-batch, the longest micro-batch of each step first so that a lack of
        memory shows at once.
    """
    order = torch.randperm(len(lengths), generator=generator)
    plan = []
    for rows in order.chunk(num_steps):
        by_length = rows[lengths[rows].argsort(descending=True, stable=True)]
        plan.append([part.tolist() for part in by_length.split(micro_batch_size)])
    return plan
