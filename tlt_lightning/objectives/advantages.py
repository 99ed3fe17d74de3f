"""How much better than expected a response, or a token of it, was: the estimators that objectives are built on.

Rewards come in two parts: one per response, and dense ones per token (a KL penalty in the reward). Estimators that
judge whole responses add the dense ones up; the others put the response's reward on its last token.

Where the references disagree:
- The epsilon beside the group's standard deviation is 1e-6 in verl and 1e-4 in TRL; `GroupNormalized.epsilon` covers
  both.
- A response alone in its group has no advantage here; verl gives it its raw reward.
- Whitening uses the statistics of all ranks; verl and TRL use those of the global batch they hold on one process.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from tlt_lightning.data.batch import RolloutBatch
from tlt_lightning.objectives.base import Reduce
from tlt_lightning.objectives.groups import group_statistics
from tlt_lightning.objectives.numerics import fill, global_moments, require
from tlt_lightning.objectives.overlong import at_last_token


def whiten(x: Tensor, mask: Tensor, reduce: Reduce) -> Tensor:
    """Shift and scale the unmasked tokens of all ranks to mean 0 and variance 1; masked ones become 0."""
    mean, variance = global_moments(x, mask, reduce)
    return fill((x - mean) * torch.rsqrt(variance + 1e-8), mask)


def discounted_sum(x: Tensor, decay: Tensor) -> Tensor:
    """Solve y_t = x_t + decay_t * y_{t+1} along the last dimension, in log2(T) steps instead of T.

    Args:
        x: What is added at each token. (B, T)
        decay: What the rest of the sequence is multiplied by at each token. (B, T)
    """
    step = 1
    while step < x.shape[-1]:
        x = x + decay * pad(x[:, step:], (0, step))
        decay = decay * pad(decay[:, step:], (0, step))
        step *= 2
    return x


def generalized_advantages(
    rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Return advantages and returns by GAE (arXiv 1506.02438, Eq. 16), neither of them whitened, (B, T) each.

    Masked tokens inside a response are stepped over: the token before them continues with the token after. Truncated
    responses end like finished ones, without bootstrapping.

    Args:
        rewards: Reward of each token. (B, T)
        values: Predicted return from each token on. (B, T)
        mask: Response tokens. (B, T), bool
        gamma: Discount per token.
        lam: 1 trusts the sampled return, 0 the critic.
    """
    values = fill(values, mask)
    next_values = pad(discounted_sum(values, fill(torch.ones_like(values), ~mask))[:, 1:], (0, 1))
    errors = fill(rewards + gamma * next_values - values, mask)
    advantages = discounted_sum(errors, torch.where(mask, torch.full_like(values, gamma * lam), 1.0))
    return fill(advantages, mask), fill(advantages + values, mask)


class AdvantageEstimator(ABC):
    """Turns the rewards of an iteration into advantages."""

    needs_critic: ClassVar[bool] = False
    """True if it reads `batch.values`."""

    min_group_size: ClassVar[int] = 1
    """Fewest responses per prompt it can compare."""

    @abstractmethod
    def __call__(
        self, batch: RolloutBatch, rewards: Tensor, token_rewards: Tensor, reduce: Reduce
    ) -> tuple[Tensor, Tensor | None]:
        """Return the advantages and, from a critic's values, its targets, (B, T) each and 0 where masked.

        Args:
            batch: All sequences of this rank.
            rewards: One value per sequence; use these, `batch.rewards` may have been reshaped. (B,)
            token_rewards: Rewards on top of it for each token, 0 where masked. (B, T)
            reduce: Sums over ranks.
        """


class _GroupEstimator(AdvantageEstimator):
    """Compares each response with its siblings and gives all of its tokens the same advantage."""

    min_group_size: ClassVar[int] = 2

    @abstractmethod
    def _per_sequence(self, centred: Tensor, std: Tensor, size: Tensor) -> Tensor:
        """Return the advantage of each sequence from `groups.group_statistics`, (B,)."""

    def __call__(
        self, batch: RolloutBatch, rewards: Tensor, token_rewards: Tensor, reduce: Reduce
    ) -> tuple[Tensor, Tensor | None]:
        """Return the advantage of its sequence for each token, and no targets."""
        scores = self._per_sequence(*group_statistics(rewards + token_rewards.sum(-1), batch.groups))
        mask = batch.response_mask.bool()
        return fill(scores[:, None].expand(mask.shape), mask), None


@dataclass(frozen=True, kw_only=True)
class GroupNormalized(_GroupEstimator):
    """GRPO: reward minus the group's mean, over its standard deviation (arXiv 2402.03300, section 4.1.2).

    Args:
        epsilon: Added to the standard deviation; TRL uses 1e-4.
    """

    epsilon: float = 1e-6

    def _per_sequence(self, centred: Tensor, std: Tensor, size: Tensor) -> Tensor:
        return centred / (std + self.epsilon)


@dataclass(frozen=True)
class GroupCentred(_GroupEstimator):
    """Dr.GRPO: reward minus the group's mean, so that easy and hard prompts are not blown up (arXiv 2503.20783)."""

    def _per_sequence(self, centred: Tensor, std: Tensor, size: Tensor) -> Tensor:
        return centred


@dataclass(frozen=True)
class LeaveOneOut(_GroupEstimator):
    """RLOO: reward minus the mean of the other responses, an unbiased baseline (arXiv 2402.14740)."""

    def _per_sequence(self, centred: Tensor, std: Tensor, size: Tensor) -> Tensor:
        return centred * size / (size - 1).clamp(min=1)


@dataclass(frozen=True)
class WhitenedGroupBaseline(_GroupEstimator):
    """REINFORCE++-baseline: reward minus the group's mean, whitened over the iteration (arXiv 2501.03262)."""

    def _per_sequence(self, centred: Tensor, std: Tensor, size: Tensor) -> Tensor:
        return centred

    def __call__(
        self, batch: RolloutBatch, rewards: Tensor, token_rewards: Tensor, reduce: Reduce
    ) -> tuple[Tensor, Tensor | None]:
        """Return the whitened advantages, and no targets."""
        advantages, _ = super().__call__(batch, rewards, token_rewards, reduce)
        return whiten(advantages, batch.response_mask.bool(), reduce), None


@dataclass(frozen=True, kw_only=True)
class WhitenedRewardToGo(AdvantageEstimator):
    """REINFORCE++: the discounted rewards still to come, whitened over the iteration (arXiv 2501.03262).

    Args:
        gamma: Discount per token; 1 treats early and late tokens alike.
    """

    gamma: float = 1.0

    def __post_init__(self) -> None:
        _check_unit_interval(gamma=self.gamma)

    def __call__(
        self, batch: RolloutBatch, rewards: Tensor, token_rewards: Tensor, reduce: Reduce
    ) -> tuple[Tensor, Tensor | None]:
        """Return the whitened rewards to go, and no targets."""
        mask = batch.response_mask.bool()
        token_rewards = at_last_token(rewards, mask) + token_rewards
        # A masked token inside a response passes the return on undiscounted.
        decay = torch.where(mask, torch.full_like(token_rewards, self.gamma), 1.0)
        return whiten(discounted_sum(token_rewards, decay), mask, reduce), None


@dataclass(frozen=True, kw_only=True)
class GAE(AdvantageEstimator):
    """Generalized advantage estimation from a critic's values, whitened over the iteration (arXiv 1506.02438).

    Args:
        gamma: Discount per token; 1 because the reward comes at the end, thousands of tokens away.
        lam: 1 trusts the sampled return (no bias, verl's default), lower trusts the critic more (less variance);
            0.95 is PPO's own.
    """

    needs_critic: ClassVar[bool] = True

    gamma: float = 1.0
    lam: float = 0.95

    def __post_init__(self) -> None:
        _check_unit_interval(gamma=self.gamma, lam=self.lam)

    def __call__(
        self, batch: RolloutBatch, rewards: Tensor, token_rewards: Tensor, reduce: Reduce
    ) -> tuple[Tensor, Tensor | None]:
        """Return the whitened advantages and the critic's targets."""
        mask = batch.response_mask.bool()
        values = require(batch.values, "values", "GAE starts from the critic's predictions")
        token_rewards = at_last_token(rewards, mask) + token_rewards
        advantages, returns = generalized_advantages(token_rewards, values, mask, gamma=self.gamma, lam=self.lam)
        return whiten(advantages, mask, reduce), returns


def _check_unit_interval(**values: float) -> None:
    for name, value in values.items():
        if not 0 <= value <= 1:
            raise ValueError(f"`{name}` must be in [0, 1], got {value}.")
