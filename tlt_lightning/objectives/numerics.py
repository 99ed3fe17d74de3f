"""Numerical guards shared by the objectives: precision, masking and bounded log-ratios."""

import torch
from torch import Tensor

from tlt_lightning.objectives.base import Reduce

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to plus and minus this before `exp` (verl's bound): e^20 is 4.9e8, far beyond every clip
range, and sums of it stay finite in float32. A clamped token has no gradient."""


def upcast(x: Tensor) -> Tensor:
    """Return `x` in float32, or untouched if it is float64, so that half precision never enters the loss."""
    return x if x.dtype == torch.float64 else x.float()


def fill(x: Tensor, mask: Tensor, value: float = 0.0) -> Tensor:
    """Return `x` upcast, with `value` where `mask` is False.

    Selecting instead of multiplying by zero keeps garbage in padding, infinities included, out of both the loss and
    its gradient.
    """
    return torch.where(mask, upcast(x), value)


def require(x: Tensor | None, name: str, reason: str) -> Tensor:
    """Return `x`, or say which field of the batch is missing.

    Raises:
        ValueError: If `x` is None.
    """
    if x is None:
        raise ValueError(f"`batch.{name}` is None but {reason}; fill it in before calling the objective.")
    return x


def log_ratio(logps: Tensor, old_logps: Tensor) -> Tensor:
    """Return log(new / old) clamped to `MAX_LOG_RATIO` on both sides; the shape is that of the inputs."""
    return (logps - old_logps).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def sequence_sum(x: Tensor, mask: Tensor) -> Tensor:
    """Sum `x` (B, T) over the unmasked tokens of each sequence, (B, 1)."""
    return fill(x, mask).sum(-1, keepdim=True)


def sequence_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Average `x` (B, T) over the unmasked tokens of each sequence, (B, 1); 0 for a sequence without any."""
    return sequence_sum(x, mask) / mask.sum(-1, keepdim=True).clamp(min=1)


def global_moments(x: Tensor, mask: Tensor, reduce: Reduce) -> tuple[Tensor, Tensor]:
    """Return the mean and the unbiased variance of the unmasked tokens of all ranks.

    Two passes, because E[x^2] - E[x]^2 cancels in float32. With fewer than two tokens the variance is 0.

    Args:
        x: Values. (B, T)
        mask: Tokens that count. (B, T), bool
        reduce: Sums over ranks.
    """
    total, count = reduce(torch.stack([fill(x, mask).sum(), mask.sum().to(upcast(x).dtype)])).unbind()
    mean = total / count.clamp(min=1)
    squares = reduce(fill((upcast(x) - mean).square(), mask).sum())
    return mean, squares / (count - 1).clamp(min=1)
