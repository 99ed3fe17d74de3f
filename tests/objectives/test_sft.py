"""Imitation: of given texts, and of the best responses of a rollout."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tlt_lightning.objectives import GRPO, SFT, BestOfGroup, PlainPolicyGradient, TokenMean
from tlt_lightning.testing import check_objective

RandomVectors = Callable[..., SimpleNamespace]


def best_tokens(batch: Any, above: float = 0.0) -> Tensor:
    """Tokens of each group's best responses, one by one."""
    kept = torch.zeros_like(batch.response_mask).bool()
    for row, group in enumerate(batch.groups.tolist()):
        best = max(float(batch.rewards[other]) for other, its in enumerate(batch.groups.tolist()) if its == group)
        if above < float(batch.rewards[row]) == best:
            kept[row] = batch.response_mask[row].bool()
    return kept


@pytest.mark.parametrize("objective", [SFT(), GRPO(imitation=BestOfGroup(coef=0.1)), GRPO(advantage=BestOfGroup())])
def test_objectives_that_imitate_pass_the_kit(objective: Any) -> None:
    check_objective(objective)


def test_given_texts_weigh_one_and_the_loss_is_their_cross_entropy(random_vectors: RandomVectors) -> None:
    vectors = random_vectors(0)
    mask = vectors.batch.response_mask.bool()
    output = SFT().loss(vectors.batch, vectors.logps, vectors.entropy, None)
    torch.testing.assert_close(output.loss, -vectors.logps[mask].mean())
    torch.testing.assert_close(output.metrics["train/entropy"], vectors.entropy[mask].mean())
    assert not any(name.startswith("mismatch/") for name in output.metrics)


@pytest.mark.parametrize("above", [0.0, 0.2])
@pytest.mark.parametrize("seed", range(3))
def test_the_best_of_each_group_are_imitated(seed: int, above: float, random_vectors: RandomVectors) -> None:
    """The loss is the mean cross-entropy of their tokens alone, by `SFT` and by the pieces."""
    vectors = random_vectors(seed)
    batch, best = vectors.batch, BestOfGroup(above=above)
    expected = -vectors.logps[best_tokens(batch, above)].mean()
    pieces = GRPO(advantage=best, surrogate=PlainPolicyGradient(), aggregation=TokenMean(), correction=None)
    for objective in (SFT(best=best), pieces):
        advantages, _ = objective.advantages(batch, lambda x: x)
        scored = replace(batch, advantages=advantages, old_logps=vectors.logps)
        torch.testing.assert_close(objective.loss(scored, vectors.logps, vectors.entropy, None).loss, expected)


def test_what_tokens_cost_decides_who_is_best(random_vectors: RandomVectors) -> None:
    batch = replace(random_vectors(0).batch, response_mask=torch.ones(2, 1), groups=torch.tensor([5, 5]))
    advantages, _ = BestOfGroup()(batch, torch.ones(2), torch.tensor([[-0.5], [0.0]]), lambda x: x)
    assert advantages.tolist() == [[0.0], [2.0]]  # one token of two is kept


def test_a_group_without_any_reward_teaches_nothing(random_vectors: RandomVectors) -> None:
    batch = random_vectors(0).batch
    batch.rewards = torch.zeros_like(batch.rewards)
    advantages, _ = SFT().advantages(batch, lambda x: x)
    assert not advantages.any()
    assert advantages.isfinite().all()


def test_ranks_weigh_by_the_tokens_of_all(random_vectors: RandomVectors, on_ranks: Callable[..., list[Any]]) -> None:
    batches = [random_vectors(seed).batch for seed in (0, 1)]
    kept = [best_tokens(batch) for batch in batches]
    weight = sum(batch.response_mask.sum() for batch in batches) / sum(each.sum() for each in kept)
    found = on_ranks(lambda batch, reduce: SFT().advantages(batch, reduce)[0], batches)
    for advantages, own in zip(found, kept, strict=True):
        torch.testing.assert_close(advantages, own * weight)


def test_imitation_beside_rl_adds_its_gradient(random_vectors: RandomVectors) -> None:
    vectors = random_vectors(0)
    settings: dict[str, Any] = {"surrogate": PlainPolicyGradient(), "aggregation": TokenMean(), "correction": None}
    gradients = []
    for objective in (GRPO(**settings), GRPO(imitation=BestOfGroup(coef=0.25), **settings), SFT()):
        logps = vectors.logps.clone().requires_grad_()
        advantages, _ = objective.advantages(vectors.batch, lambda x: x)
        scored = replace(vectors.batch, advantages=advantages, old_logps=vectors.logps)
        objective.loss(scored, logps, vectors.entropy, None).loss.backward()
        gradients.append(logps.grad)
    torch.testing.assert_close(gradients[1], gradients[0] + 0.25 * gradients[2])
