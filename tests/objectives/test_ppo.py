"""PPO: generalized advantages, the critic's loss, and how well the critic foresees."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tlt_lightning.objectives import (
    GAE,
    K1,
    PPO,
    BehaviourPolicy,
    GroupNormalized,
    KLPenalty,
    explained_variance,
    whiten,
)


def identity(x: Tensor) -> Tensor:
    return x


def gae_by_recursion(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> Tensor:
    """The definition, one token after another, over the unmasked tokens alone."""
    advantages = torch.zeros_like(values)
    for row in range(len(values)):
        advantage = next_value = torch.tensor(0.0)
        for t in reversed(mask[row].nonzero()[:, 0].tolist()):
            error = rewards[row, t] + gamma * next_value - values[row, t]
            advantage = advantages[row, t] = error + gamma * lam * advantage
            next_value = values[row, t]
    return advantages


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.8), (1.0, 0.0), (1.0, 1.0)])
def test_gae_with_kl_in_the_reward_is_the_recursion(
    gamma: float, lam: float, random_vectors: Callable[..., Any]
) -> None:
    batch = random_vectors(3).batch
    objective = PPO(advantage=GAE(gamma=gamma, lam=lam), reward_kl=KLPenalty(coef=0.2, estimator=K1()))
    advantages, returns = objective.advantages(batch, identity)

    mask = batch.response_mask.bool()
    rewards = -0.2 * (batch.old_logps - batch.ref_logps)
    for row in range(len(batch)):
        if mask[row].any():
            rewards[row, mask[row].nonzero()[-1]] += batch.rewards[row]
    expected = gae_by_recursion(rewards, batch.values, mask, gamma, lam)
    torch.testing.assert_close(returns, (expected + batch.values) * mask)
    torch.testing.assert_close(advantages, whiten(expected, mask, identity))
    kept = advantages[mask]
    assert kept.mean().item() == pytest.approx(0, abs=1e-6)
    assert kept.var().item() == pytest.approx(1, abs=1e-6)


def test_value_loss_pulls_towards_returns_until_clipped(vectors: Any) -> None:
    batch, values = vectors.batch, vectors.batch.values.clone().requires_grad_()
    batch.advantages = torch.zeros_like(values)
    batch.returns = batch.values + 1.0
    PPO(value_coef=2.0).loss(batch, vectors.logps, vectors.entropy, values).loss.backward()
    torch.testing.assert_close(values.grad, -2.0 * batch.response_mask / 16)

    ahead = (batch.values + 0.5).requires_grad_()  # further than the clip of 0.2 allows: nothing more to gain
    PPO(value_clip=0.2).loss(batch, vectors.logps, vectors.entropy, ahead).loss.backward()
    assert (ahead.grad == 0).all()
    unclipped = ahead.detach().requires_grad_()
    PPO(value_clip=None).loss(batch, vectors.logps, vectors.entropy, unclipped).loss.backward()
    torch.testing.assert_close(unclipped.grad, -0.5 * batch.response_mask / 16)


def test_explained_variance_of_all_ranks(random_vectors: Callable[..., Any], on_ranks: Callable[..., Any]) -> None:
    batch = random_vectors(0).batch
    returns, mask = batch.values, batch.response_mask
    shifted = 1e30 * (1 - mask) + mask * (returns + 3)  # a constant error is no variance
    assert explained_variance(shifted, returns, mask, identity).item() == pytest.approx(1)
    assert explained_variance(torch.zeros_like(returns), returns, mask, identity).item() == pytest.approx(0)
    assert explained_variance(-returns, returns, mask, identity).item() == pytest.approx(-3)
    assert explained_variance(returns, torch.ones_like(returns), mask, identity) == 0
    for reward in (0.0, 1.0):  # the same for all: returns differ by rounding alone
        equal = replace(batch, rewards=torch.full_like(batch.rewards, reward))
        _, returns_of_all = PPO(advantage=GAE(gamma=1.0, lam=1.0)).advantages(equal, identity)
        assert explained_variance(batch.values, returns_of_all, mask, identity) == 0

    predictions = batch.ref_logps
    whole = explained_variance(predictions, returns, mask, identity)
    ranks = [slice(0, 5), slice(5, None)]
    for value in on_ranks(
        lambda rows, reduce: explained_variance(predictions[rows], returns[rows], mask[rows], reduce), ranks
    ):
        torch.testing.assert_close(value, whole)


def test_what_ppo_needs_from_the_trainer() -> None:
    assert PPO.needs_critic
    assert not PPO().needs_reference
    assert PPO(reward_kl=KLPenalty()).needs_reference
    assert PPO().min_group_size == 1
    assert PPO().target_kl is None


def test_how_old_a_text_is_moves_no_policy(vectors: Any) -> None:
    """`target_kl` would end the updates of an asynchronous iteration before the first."""
    batch = vectors.batch
    batch.advantages = batch.returns = torch.zeros_like(vectors.logps)
    objective = PPO(proximal=BehaviourPolicy())
    assert not torch.equal(batch.rollout_logps, batch.old_logps)
    assert objective.loss(batch, batch.old_logps, vectors.entropy, batch.values).metrics["train/approx_kl"] == 0


def test_an_advantage_without_targets_for_the_critic_is_refused() -> None:
    with pytest.raises(ValueError, match="GroupNormalized needs no critic, and PPO trains one"):
        PPO(advantage=GroupNormalized())


def test_a_missing_critic_is_named(vectors: Any) -> None:
    vectors.batch.advantages = vectors.batch.returns = torch.zeros_like(vectors.logps)
    with pytest.raises(ValueError, match="`values` is None"):
        PPO().loss(vectors.batch, vectors.logps, vectors.entropy, None)
    vectors.batch.values = None
    with pytest.raises(ValueError, match=r"`batch\.values` is None"):
        PPO().advantages(vectors.batch, identity)
