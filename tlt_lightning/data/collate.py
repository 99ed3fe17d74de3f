"""Turn rollouts into tensors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from tlt_lightning.data.batch import Rollout, RolloutBatch


def collate(rollouts: Sequence[Rollout], *, pad_id: int, temperature: float) -> RolloutBatch:
    """Build the batch of `rollouts`, on the CPU, sequences right-padded with `pad_id`."""
    # NumPy reads a list of numbers faster than `torch.tensor` does.
    texts = ([*rollout.prompt.ids, *rollout.response.token_ids] for rollout in rollouts)
    sequences = [torch.from_numpy(np.array(text, np.int64)) for text in texts]
    logps = [torch.from_numpy(np.array(rollout.response.logps, np.float32)) for rollout in rollouts]
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
