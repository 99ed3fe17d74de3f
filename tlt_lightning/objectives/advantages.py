"""Estimate the advantage: by how much a token's response beats the expectation.

Rewards come in two parts: one per response, and dense ones per token (a KL penalty in the reward). Estimators that
judge whole responses add the dense ones up; the others put the response's reward on its last token, but what an
environment gave a turn on that turn's.

Where the references disagree:
- The epsilon beside the group's standard deviation is 1e-6 in verl, 1e-4 in TRL; see `GroupNormalized.epsilon`.
- A response alone in its group has no advantage here; verl gives it its raw reward.
- Whitening uses the statistics of all ranks; verl and TRL use those of the global batch they hold on one process.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from tlt_lightning.arguments import Positive, Probability, checked
from tlt_lightning.objectives.base import Advantages, Reduce, fill, require, upcast
from tlt_lightning.rollout import RolloutBatch


def global_moments(x: Tensor, mask: Tensor, reduce: Reduce) -> tuple[Tensor, Tensor]:
    """Return the mean and the unbiased variance of the unmasked tokens of all ranks, in float64.

    Two passes, because E[x^2] - E[x]^2 cancels. The variance is 0 with fewer than two tokens, and where the deviations
    are within the rounding of the values themselves.

    Args:
        x: Values. (B, T)
        mask: Tokens that count. (B, T), bool
        reduce: Sums over ranks.
    """
    rounding, x = 4 * torch.finfo(upcast(x).dtype).eps, x.double()
    total, count = reduce(torch.stack([fill(x, mask).sum(), mask.sum().double()])).unbind()
    mean = total / count.clamp(min=1)
    variance = reduce(fill((x - mean).square(), mask).sum()) / (count - 1).clamp(min=1)
    return mean, torch.where(variance > (rounding * mean).square(), variance, 0.0)


def whiten(x: Tensor, mask: Tensor, reduce: Reduce) -> Tensor:
    """Scale unmasked tokens of all ranks to mean 0, variance 1; masked or equal ones become 0."""
    mean, variance = global_moments(x, mask, reduce)
    whitened = (x.double() - mean) * torch.rsqrt(variance + 1e-8)
    return fill(whitened, mask & (variance > 0)).to(upcast(x).dtype)


def group_statistics(rewards: Tensor, groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compare each reward with those of its group: the baseline of objectives without a critic.

    Sums go through a table, because `index_add` is not deterministic on CUDA; rewards are taken relative to the group's
    lowest, so that equal rewards are centred to exactly zero.

    Args:
        rewards: One value per sequence. (B,)
        groups: Sequences with equal numbers answer the same prompt. (B,), int64

    Returns:
        For each sequence its reward minus the group's mean, the group's standard deviation (Bessel's correction; 0
        for a group of one), and the group's size. (B,) each
    """
    rewards = upcast(rewards)
    names, index = torch.unique(groups, return_inverse=True)
    members = index == torch.arange(len(names), device=groups.device)[:, None]  # (G, B)
    size = members.sum(-1)
    lowest = torch.where(members, rewards, torch.inf).amin(-1)
    shifted = rewards - lowest[index]
    mean = torch.where(members, shifted, 0.0).sum(-1) / size
    centred = shifted - mean[index]
    variance = torch.where(members, centred.square(), 0.0).sum(-1) / (size - 1).clamp(min=1)
    return centred, variance.sqrt()[index], size[index]


def at_last_token(rewards: Tensor, mask: Tensor) -> Tensor:
    """Give each sequence's reward (B,) to its last unmasked token, (B, T), if there is one."""
    num_after = mask.flip(-1).cumsum(-1).flip(-1)
    return torch.where(mask & (num_after == 1), upcast(rewards)[:, None], 0.0)


def where_earned(batch: RolloutBatch, rewards: Tensor, mask: Tensor) -> Tensor:
    """Give each sequence's reward (B,) to the last tokens of the turns that earned it, the rest to its last, (B, T)."""
    if batch.turn_rewards is None:
        return at_last_token(rewards, mask)
    of_turns = fill(batch.turn_rewards, mask)
    return at_last_token(rewards - of_turns.sum(-1), mask) + of_turns


def discounted_sum(x: Tensor, decay: Tensor) -> Tensor:
    """Solve y_t = x_t + decay_t * y_{t+1}, (B, T) each, in log2(T) steps instead of T."""
    step = 1
    while step < x.shape[-1]:
        x = x + decay * pad(x[:, step:], (0, step))
        decay = decay * pad(decay[:, step:], (0, step))
        step *= 2
    return x


class AdvantageEstimator(ABC):
    """Turns the rewards of an iteration into advantages."""

    needs_critic: ClassVar[bool] = False
    """True if it reads `batch.values`."""

    min_group_size: ClassVar[int] = 1
    """Fewest responses per prompt it can compare."""

    @abstractmethod
    def __call__(self, batch: RolloutBatch, rewards: Tensor, token_rewards: Tensor, reduce: Reduce) -> Advantages:
        """Return the advantages and, from a critic's values, its targets.

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
        """Return the advantage of each sequence from `group_statistics`, (B,)."""

    def __call__(self, batch: RolloutBatch, rewards: Tensor, token_rewards: Tensor, reduce: Reduce) -> Advantages:
        scores = self._per_sequence(*group_statistics(rewards + token_rewards.sum(-1), batch.groups))
        mask = batch.response_mask.bool()
        return fill(scores[:, None].expand(mask.shape), mask), None


@dataclass(frozen=True, kw_only=True)
class GroupNormalized(_GroupEstimator):
    """Subtracts the group's mean, divides by its deviation: GRPO (arXiv 2402.03300, 4.1.2).

    Args:
        epsilon: Added to the standard deviation; TRL uses 1e-4.
    """

    epsilon: float = 1e-6

    def _per_sequence(self, centred: Tensor, std: Tensor, size: Tensor) -> Tensor:
        return centred / (std + self.epsilon)


@dataclass(frozen=True)
class GroupCentred(_GroupEstimator):
    """Subtracts the group's mean; blows no easy prompt up: Dr.GRPO (arXiv 2503.20783)."""

    def _per_sequence(self, centred: Tensor, std: Tensor, size: Tensor) -> Tensor:
        return centred


@dataclass(frozen=True)
class LeaveOneOut(_GroupEstimator):
    """Subtracts the mean of the others, an unbiased baseline: RLOO (arXiv 2402.14740)."""

    def _per_sequence(self, centred: Tensor, std: Tensor, size: Tensor) -> Tensor:
        return centred * size / (size - 1).clamp(min=1)


@dataclass(frozen=True)
class WhitenedGroupBaseline(GroupCentred):
    """Whitens GroupCentred over the iteration: REINFORCE++-baseline (arXiv 2501.03262)."""

    def __call__(self, batch: RolloutBatch, rewards: Tensor, token_rewards: Tensor, reduce: Reduce) -> Advantages:
        advantages, _ = super().__call__(batch, rewards, token_rewards, reduce)
        return whiten(advantages, batch.response_mask.bool(), reduce), None


@checked()
@dataclass(frozen=True, kw_only=True)
class BestOfGroup(AdvantageEstimator):
    """Keeps the responses with the highest reward of their group, and drops all others: RAFT (arXiv 2304.06767).

    With a `PlainPolicyGradient` and `TokenMean` the loss is `coef` times the mean cross-entropy of the tokens that are
    kept, in the mean over an iteration's steps.

    Args:
        above: Rewards that are kept are larger: of a group that has none, nothing is.
        coef: Weight of the loss.
    """

    above: float = 0.0
    coef: Positive = 1.0

    def __call__(self, batch: RolloutBatch, rewards: Tensor, token_rewards: Tensor, reduce: Reduce) -> Advantages:
        """Return for each kept token the tokens of all ranks' responses, over those of them that are kept."""
        scores, mask = upcast(rewards + token_rewards.sum(-1)), batch.response_mask.bool()
        siblings = batch.groups[:, None] == batch.groups
        best = torch.where(siblings, scores, -torch.inf).amax(-1)
        kept = mask & ((scores == best) & (scores > self.above))[:, None]
        total, num_kept = reduce(torch.stack([mask.sum(), kept.sum()]).to(scores.dtype)).unbind()
        return torch.where(kept, self.coef * total / num_kept.clamp(min=1), 0.0), None


@checked()
@dataclass(frozen=True, kw_only=True)
class WhitenedRewardToGo(AdvantageEstimator):
    """Whitens discounted rewards to go: REINFORCE++ (arXiv 2501.03262).

    Args:
        gamma: Discount per token; 1 treats early and late tokens alike.
    """

    gamma: Probability = 1.0

    def __call__(self, batch: RolloutBatch, rewards: Tensor, token_rewards: Tensor, reduce: Reduce) -> Advantages:
        mask = batch.response_mask.bool()
        token_rewards = where_earned(batch, rewards, mask) + token_rewards
        # A masked token inside a response passes the return on undiscounted.
        decay = torch.where(mask, torch.full_like(token_rewards, self.gamma), 1.0)
        return whiten(discounted_sum(token_rewards, decay), mask, reduce), None


@checked()
@dataclass(frozen=True, kw_only=True)
class GAE(AdvantageEstimator):
    """Estimates advantages from a critic, whitened: GAE (arXiv 1506.02438, Eq. 16).

    Args:
        gamma: Discount per token; 1 because the reward comes at the end, thousands of tokens away.
        lam: 1 trusts the sampled return (no bias, verl), lower trusts the critic (less variance); 0.95 is PPO's own.
    """

    needs_critic: ClassVar[bool] = True

    gamma: Probability = 1.0
    lam: Probability = 0.95

    def __call__(self, batch: RolloutBatch, rewards: Tensor, token_rewards: Tensor, reduce: Reduce) -> Advantages:
        """Return the whitened advantages and the critic's targets, which are not whitened.

        Masked tokens inside a response are stepped over: the token before them continues with the token after.
        Truncated responses end like finished ones, without bootstrapping.
        """
        mask = batch.response_mask.bool()
        values = fill(require(batch.values, "values", "GAE starts from the critic's predictions"), mask)
        token_rewards = where_earned(batch, rewards, mask) + token_rewards
        next_values = pad(discounted_sum(values, fill(torch.ones_like(values), ~mask))[:, 1:], (0, 1))
        errors = fill(token_rewards + self.gamma * next_values - values, mask)
        advantages = discounted_sum(errors, torch.where(mask, torch.full_like(values, self.gamma * self.lam), 1.0))
        return whiten(advantages, mask, reduce), fill(advantages + values, mask)
