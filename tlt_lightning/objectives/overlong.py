"""Rewards before they become advantages: where they land in the sequence, and the price of being too long."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tlt_lightning.data.batch import RolloutBatch
from tlt_lightning.objectives.numerics import upcast


def at_last_token(rewards: Tensor, mask: Tensor) -> Tensor:
    """Give each sequence's reward to its last unmasked token, for estimators that work token by token.

    Args:
        rewards: One value per sequence. (B,)
        mask: Response tokens. (B, T), bool

    Returns:
        Zero but for the last unmasked token of each sequence; a sequence without one is all zero. (B, T)
    """
    num_after = mask.flip(-1).cumsum(-1).flip(-1)
    return torch.where(mask & (num_after == 1), upcast(rewards)[:, None], 0.0)


def overlong_punishment(lengths: Tensor, max_tokens: int, buffer_tokens: int) -> Tensor:
    """Punish responses that run into the last tokens before the limit (DAPO, arXiv 2503.14476, Eq. 13).

    Zero up to `max_tokens - buffer_tokens`, falling linearly to -1 at `max_tokens`, and -1 beyond. verl lets it fall
    on below -1; we follow the paper and TRL.

    Args:
        lengths: Response tokens. Any shape
        max_tokens: Longest allowed response.
        buffer_tokens: Width of the ramp in tokens.

    Returns:
        What to add to the rewards, between -1 and 0. float32, shape of `lengths`
    """
    return ((max_tokens - buffer_tokens - lengths.float()) / buffer_tokens).clamp(-1.0, 0.0)


@dataclass(frozen=True, kw_only=True)
class OverlongPunishment:
    """Lower the reward of responses that come close to the length limit, so that length stops before truncation.

    Args:
        max_tokens: Longest response; the same number as the sampling's `max_tokens`.
        buffer_tokens: The punishment grows from 0 to -1 over this many tokens before the limit; DAPO uses a fifth of
            the limit (4096 of 20480).

    Example:
        >>> OverlongPunishment(max_tokens=100, buffer_tokens=20)
        OverlongPunishment(max_tokens=100, buffer_tokens=20)
    """

    max_tokens: int
    buffer_tokens: int

    def __post_init__(self) -> None:
        if not 1 <= self.buffer_tokens <= self.max_tokens:
            raise ValueError(
                f"`overlong.buffer_tokens` must be between 1 and `overlong.max_tokens` ({self.max_tokens}), "
                f"got {self.buffer_tokens}."
            )

    def __call__(self, batch: RolloutBatch) -> Tensor:
        """Return what to add to each sequence's reward, (B,).

        A truncated sequence is at the limit, also where its tokens are masked out of the loss and cannot be counted.
        """
        lengths = torch.where(batch.truncated, self.max_tokens, batch.response_lengths)
        return overlong_punishment(lengths, self.max_tokens, self.buffer_tokens)
