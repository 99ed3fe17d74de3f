"""Advantages: where rewards land, groups, discounted sums, whitening."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from tlt_lightning.objectives import (
    GroupNormalized,
    LeaveOneOut,
    ReinforcePlusPlus,
    WhitenedRewardToGo,
    explained_variance,
    whiten,
)
from tlt_lightning.objectives.advantages import at_last_token, discounted_sum, group_statistics

RandomVectors = Callable[..., SimpleNamespace]


def test_reward_lands_on_the_last_unmasked_token() -> None:
    mask = torch.tensor([[1, 0, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0]]).bool()
    placed = at_last_token(torch.tensor([1.0, 2.0, 3.0]), mask)
    assert placed.tolist() == [[0, 0, 1, 0], [0, 0, 0, 2], [0, 0, 0, 0]]


def test_a_reward_is_compared_with_its_own_group_of_whatever_size() -> None:
    rewards = torch.tensor([1.0, -2.0, 4.0, 0.5, 3.0, 0.0, 7.0, 1.5])
    groups = torch.tensor([5, 9, 5, 9, 9, 2, 5, 5])
    centred, deviation, size = group_statistics(rewards, groups)
    for group in (2, 5, 9):
        own = rewards[groups == group]
        torch.testing.assert_close(centred[groups == group], own - own.mean())
        std = own.std() if len(own) > 1 else torch.tensor(0.0)
        torch.testing.assert_close(deviation[groups == group], std.expand(len(own)))
        assert size[groups == group].tolist() == [len(own)] * len(own)


def test_leave_one_out_subtracts_the_mean_of_the_others(random_vectors: RandomVectors) -> None:
    batch = random_vectors(0, group_size=5).batch
    mask = batch.response_mask.bool()
    token_rewards = batch.ref_logps * mask
    advantages, _ = LeaveOneOut()(batch, batch.rewards, token_rewards, lambda x: x)
    earned = batch.rewards + token_rewards.sum(-1)
    for row, group in enumerate(batch.groups):
        others = earned[(batch.groups == group) & (torch.arange(len(batch)) != row)]
        torch.testing.assert_close(advantages[row], (earned[row] - others.mean()) * mask[row])


def test_a_turn_is_judged_by_what_was_earned_from_it_on(random_vectors: RandomVectors) -> None:
    batch = random_vectors(0).batch
    batch.response_mask = torch.tensor([[1.0, 1, 0, 1, 1]]).repeat(3, 1)  # an observation between two turns
    batch.response_mask[2, 1] = 0  # by a callback: what this token earned is the response's
    batch.turn_rewards = torch.tensor([[0.0, 3, 0, 0, 1], [0, 0, 0, 0, 2], [0, 3, 0, 0, 1]])
    rewards, zeros = torch.tensor([4.5, 2.0, 4.0]), torch.zeros(3, 5)  # half a point comes from elsewhere
    advantages, _ = WhitenedRewardToGo()(batch, rewards, zeros, lambda x: x)
    to_go = torch.tensor([4.5, 4.5, 1.5, 1.5, 2, 2, 2, 2, 4, 4, 4])
    kept = advantages[batch.response_mask.bool()]
    torch.testing.assert_close(kept, (to_go - to_go.mean()) / to_go.std(), atol=1e-5, rtol=0)
    batch.groups = torch.tensor([0, 0, 1])
    of_groups, _ = GroupNormalized()(batch, rewards, zeros, lambda x: x)  # the whole response, by default
    torch.testing.assert_close(of_groups[0].unique(), torch.tensor([0, 0.5**0.5]), atol=1e-5, rtol=0)


@pytest.mark.parametrize("num_tokens", [1, 2, 7, 64])
def test_discounted_sum_is_the_plain_recursion(num_tokens: int) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    x, decay = torch.rand(2, 3, num_tokens, generator=generator, dtype=torch.float64)
    expected, running = torch.zeros_like(x), torch.zeros(3, dtype=torch.float64)
    for t in reversed(range(num_tokens)):
        running = expected[:, t] = x[:, t] + decay[:, t] * running
    torch.testing.assert_close(discounted_sum(x, decay), expected)


def test_a_response_alone_in_its_group_has_no_advantage(random_vectors: RandomVectors) -> None:
    batch = random_vectors(0).batch
    batch.groups = torch.arange(len(batch))
    zeros = torch.zeros_like(batch.old_logps)
    for estimator in (GroupNormalized(), LeaveOneOut()):
        assert (estimator(batch, batch.rewards, zeros, lambda x: x)[0] == 0).all()


def test_masked_tokens_inside_a_response_do_not_discount(random_vectors: RandomVectors) -> None:
    objective = ReinforcePlusPlus(advantage=WhitenedRewardToGo(gamma=0.5))
    batch = random_vectors(0).batch
    batch.rewards = torch.arange(12).double() == 1  # the sequence with a hole: 9 tokens less 2
    advantages, _ = objective.advantages(batch, lambda x: x)
    to_go = (advantages - advantages[0, 0])[1, batch.response_mask[1].bool()]
    torch.testing.assert_close(to_go / to_go[-1], 0.5 ** torch.arange(6.0, -1, -1).double())


def test_a_token_that_costs_reward_lowers_what_was_to_go_up_to_it(random_vectors: RandomVectors) -> None:
    batch = random_vectors(0).batch
    token_rewards = torch.zeros_like(batch.old_logps)
    row = int(batch.response_mask.sum(-1).argmax())
    place = int(batch.response_mask[row].nonzero()[2])
    token_rewards[row, place] = -1.0
    zeros = torch.zeros_like(batch.rewards)
    advantages, _ = WhitenedRewardToGo()(batch, zeros, token_rewards, lambda x: x)
    is_lower = (advantages < 0) & batch.response_mask.bool()
    assert is_lower.nonzero().tolist() == [[row, t] for t in range(place + 1) if batch.response_mask[row, t]]


def test_two_values_are_whitened_by_their_unbiased_variance() -> None:
    x, mask = torch.tensor([[1.0, 3.0, 9.0]], dtype=torch.float64), torch.tensor([[True, True, False]])
    expected = torch.tensor([[-(0.5**0.5), 0.5**0.5, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(whiten(x, mask, lambda x: x), expected)


def test_differences_as_small_as_the_floor_of_the_variance_are_damped_by_it() -> None:
    x = torch.tensor([[0.0, 1e-4, 2e-4]], dtype=torch.float64)  # their variance is 1e-8, as is the floor
    expected = torch.tensor([[-(0.5**0.5), 0.0, 0.5**0.5]], dtype=torch.float64)
    torch.testing.assert_close(whiten(x, torch.ones(1, 3, dtype=torch.bool), lambda x: x), expected)


@pytest.mark.parametrize("value", [0.0, 0.1, -1000.3, 1e6 + 0.3])
@pytest.mark.parametrize("num_tokens", [1, 3, 1000])
def test_equal_values_are_whitened_to_zero_whatever_their_magnitude(value: float, num_tokens: int) -> None:
    x, mask = torch.full((7, num_tokens), value), torch.ones(7, num_tokens, dtype=torch.bool)
    assert (whiten(x, mask, lambda x: x) == 0).all()
    assert explained_variance(torch.zeros_like(x), x, mask, lambda x: x) == 0


@pytest.mark.parametrize(("mean", "deviation"), [(1e3, 0.1), (1e4, 0.1), (1e6, 1.0)])
def test_differences_of_a_few_roundings_beside_a_large_mean_are_whitened(mean: float, deviation: float) -> None:
    noise = torch.randn(64, 512, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x = (mean + deviation * noise).float()
    whitened, exact = whiten(x, torch.ones(64, 512, dtype=torch.bool), lambda x: x), x.double()
    torch.testing.assert_close(whitened.double(), (exact - exact.mean()) / exact.std(), atol=1e-4, rtol=1e-4)


def test_equal_large_rewards_teach_reinforce_plus_plus_nothing(random_vectors: RandomVectors) -> None:
    batch = random_vectors(0, dtype=torch.float32).batch
    batch.rewards = torch.full_like(batch.rewards, 1000.3)
    assert (ReinforcePlusPlus().advantages(batch, lambda x: x)[0] == 0).all()
