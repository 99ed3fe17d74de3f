"""From a scored batch of rollouts to what the drafter's buffer holds."""

from __future__ import annotations

import torch

from tlt_lightning.data.batch import RolloutBatch
from tlt_lightning.drafter.sequence import DraftSequence
from tlt_lightning.long_tail.buffer import DrafterBuffer, choose_rows


def rows_to_keep(
    batch: RolloutBatch, buffer: DrafterBuffer, *, hidden_size: int, share: float | None, seed: int
) -> list[int]:
    """The rows whose hidden states are worth keeping: no more than fit into the buffer, or than are trained on.

    Args:
        batch: All rollouts of a rank.
        buffer: Where their states go.
        hidden_size: Width of a state; a token has four.
        share: Share of the batch's tokens that is trained on, if that is known.
        seed: The same seed keeps the same rows.
    """
    lengths = batch.lengths
    num_tokens = buffer.max_bytes // (4 * 2 * hidden_size + 8)  # bfloat16 states, and the token itself
    if share is not None:
        wanted = share * int(lengths.sum()) / (1 - buffer.held_out_share)
        num_tokens = min(num_tokens, max(int(wanted), 2 * int(lengths.max())))
    return choose_rows(lengths.tolist(), num_tokens, torch.Generator().manual_seed(seed))


def draft_sequences(batch: RolloutBatch, policy_version: int) -> list[DraftSequence]:
    """The rows of a scored batch that hidden states were kept of, those of the policy of `policy_version`."""
    lengths = batch.lengths.tolist()
    return [
        DraftSequence(
            input_ids=batch.input_ids[row, : lengths[row]].clone(),
            states=states.layers,
            last_states=states.last,
            prompt_length=int(batch.prompt_lengths[row]),
            policy_version=policy_version,
        )
        for row, states in (batch.hidden_states or {}).items()
    ]
