"""Make one loss per optimizer step from one loss per token, however the step is split.

Each mode sums over its micro-batch, divides by a count of the whole step and multiplies by the number of ranks, over
which the step averages, so that micro-batches and data parallelism change nothing. A batch without counts
(`num_loss_tokens` or `num_loss_sequences` is 0) is a whole step by itself, with its own counts.

Difference from TRL: a sequence whose tokens are all masked is not counted (verl agrees), so padding a rank with empty
sequences or masking truncated ones does not dilute the loss.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor

from tlt_lightning.arguments import Count, checked
from tlt_lightning.objectives.base import fill
from tlt_lightning.rollout import RolloutBatch


def sequence_sum(x: Tensor, mask: Tensor) -> Tensor:
    """Sum `x` (B, T) over the unmasked tokens of each sequence, (B, 1)."""
    return fill(x, mask).sum(-1, keepdim=True)


def sequence_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Average `x` (B, T) over each sequence's unmasked tokens, (B, 1); 0 where there are none."""
    return sequence_sum(x, mask) / mask.sum(-1, keepdim=True).clamp(min=1)


def _per_sequence(total: Tensor, batch: RolloutBatch) -> Tensor:
    if batch.num_loss_sequences:
        return total * (batch.num_shares / batch.num_loss_sequences)
    return total / batch.response_mask.bool().any(-1).sum().clamp(min=1)


def token_mean(per_token: Tensor, batch: RolloutBatch) -> Tensor:
    """Average `per_token` (B, T) over the tokens of the optimizer step, as every metric is."""
    mask = batch.response_mask.bool()
    total = sequence_sum(per_token, mask).sum()
    if batch.num_loss_tokens:
        return total * (batch.num_shares / batch.num_loss_tokens)
    return total / mask.sum().clamp(min=1)


class Aggregation(ABC):
    """Turns a loss per token into a scalar; decides how much long responses weigh."""

    max_tokens: int | None = None
    """Longest response that the loss is scaled by; None where it is not."""

    @abstractmethod
    def __call__(self, per_token: Tensor, batch: RolloutBatch) -> Tensor:
        """Return this micro-batch's share of the loss.

        Args:
            per_token: Loss of each token; masked tokens are ignored. (B, T)
            batch: Its mask and the counts of the optimizer step.
        """


@dataclass(frozen=True)
class TokenMean(Aggregation):
    """Mean over tokens: every token weighs the same (DAPO, arXiv 2503.14476, Eq. 12)."""

    def __call__(self, per_token: Tensor, batch: RolloutBatch) -> Tensor:
        return token_mean(per_token, batch)


@dataclass(frozen=True)
class SequenceMeanTokenMean(Aggregation):
    """Mean of token means: every response weighs the same (GRPO, arXiv 2402.03300, Eq. 3)."""

    def __call__(self, per_token: Tensor, batch: RolloutBatch) -> Tensor:
        return _per_sequence(sequence_mean(per_token, batch.response_mask.bool()).sum(), batch)


@checked()
@dataclass(frozen=True, kw_only=True)
class SequenceMeanTokenSumNorm(Aggregation):
    """Mean over responses of token sums over a constant: no length bias (arXiv 2503.20783, 3.1).

    Args:
        max_tokens: The constant: the longest allowed response, the sampling's `max_tokens`. verl falls back to the
            longest response of the micro-batch, which makes the loss depend on the split; we do not.
    """

    max_tokens: Count = 1024

    def __call__(self, per_token: Tensor, batch: RolloutBatch) -> Tensor:
        return _per_sequence(sequence_sum(per_token, batch.response_mask.bool()).sum() / self.max_tokens, batch)
