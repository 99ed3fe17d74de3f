"""Properties of every objective on any data."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.objectives.conftest import batch_of
from tlt_lightning.objectives import (
    CISPO,
    DAPO,
    GAE,
    GRPO,
    GSPO,
    K1,
    K2,
    PPO,
    RLOO,
    SAPO,
    Aggregation,
    CappedRatio,
    ClippedRatio,
    ComposedObjective,
    DrGRPO,
    KLPenalty,
    MaskedImportance,
    OverlongPunishment,
    PlainPolicyGradient,
    ReinforcePlusPlus,
    ReinforcePlusPlusBaseline,
    SequenceMeanTokenMean,
    SequenceMeanTokenSumNorm,
    SequenceRatio,
    SoftGate,
    Surrogate,
    TokenMean,
)
from tlt_lightning.objectives.kl import log_ratio

OBJECTIVES = {
    "GRPO": GRPO(),
    "GRPO, all on": GRPO(
        surrogate=ClippedRatio(dual_clip=3.0),
        correction=MaskedImportance(level="sequence"),
        loss_kl=KLPenalty(coef=0.1),
        reward_kl=KLPenalty(coef=0.1, estimator=K1()),
        entropy_coef=0.01,
    ),
    "DrGRPO": DrGRPO(loss_kl=KLPenalty(coef=0.1, estimator=K1())),
    "DAPO": DAPO(overlong=OverlongPunishment(max_tokens=9, buffer_tokens=4)),
    "GSPO": GSPO(loss_kl=KLPenalty(estimator=K2())),
    "CISPO": CISPO(),
    "SAPO": SAPO(),
    "RLOO": RLOO(surrogate=PlainPolicyGradient(), aggregation=SequenceMeanTokenSumNorm(max_tokens=1)),
    "REINFORCE++": ReinforcePlusPlus(reward_kl=KLPenalty(coef=0.1, estimator=K1())),
    "REINFORCE++ baseline": ReinforcePlusPlusBaseline(loss_kl=KLPenalty(estimator=K2())),
    "PPO": PPO(advantage=GAE(gamma=0.99, lam=0.9), reward_kl=KLPenalty(coef=0.1, estimator=K1())),
}
EVERY_OBJECTIVE = pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES.keys())
SEEDS = pytest.mark.parametrize("seed", range(3))

RandomVectors = Callable[..., SimpleNamespace]
OnRanks = Callable[..., list[Any]]
RowsOf = Callable[..., SimpleNamespace]
NEW = ("logps", "entropy", "values")


def identity(x: Tensor) -> Tensor:
    return x


def with_advantages(objective: ComposedObjective, vectors: SimpleNamespace) -> SimpleNamespace:
    vectors.batch.advantages, vectors.batch.returns = objective.advantages(vectors.batch, identity)
    return vectors


def evaluate(objective: ComposedObjective, vectors: SimpleNamespace) -> tuple[dict[str, Tensor], list[Tensor]]:
    """The loss and the metrics, and the gradients of what the policy and the critic say."""
    leaves = [getattr(vectors, name).detach().clone().requires_grad_() for name in NEW]
    output = objective.loss(vectors.batch, *leaves)
    output.loss.backward()
    gradients = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
    return {"loss": output.loss.detach(), **output.metrics}, gradients


def assert_same(left: Any, right: Any) -> None:
    torch.testing.assert_close(left, right, atol=1e-10, rtol=1e-10)


@SEEDS
@EVERY_OBJECTIVE
def test_padding_changes_nothing_whatever_it_holds(
    objective: ComposedObjective, seed: int, random_vectors: RandomVectors
) -> None:
    vectors = random_vectors(seed)
    expected = evaluate(objective, with_advantages(objective, vectors))
    batch = vectors.batch
    mask = torch.cat([batch.response_mask, torch.zeros(len(batch), 3)], 1)

    def spoil(x: Tensor) -> Tensor:
        garbage = 1e30 * torch.randn(mask.shape, generator=torch.Generator().manual_seed(seed), dtype=x.dtype)
        garbage[:, -1], garbage[2] = torch.inf, torch.nan  # sequence 2 is masked altogether
        garbage[:, : x.shape[1]] = torch.where(batch.response_mask.bool(), x, garbage[:, : x.shape[1]])
        return garbage

    names = ("rollout_logps", "old_logps", "ref_logps", "values")
    padded = replace(batch, response_mask=mask, **{name: spoil(getattr(batch, name)) for name in names})
    spoiled = SimpleNamespace(batch=padded, **{name: spoil(getattr(vectors, name)) for name in NEW})
    metrics, gradients = evaluate(objective, with_advantages(objective, spoiled))
    assert_same(metrics, expected[0])
    assert_same([gradient[:, :-3] for gradient in gradients], expected[1])
    assert all((gradient[mask == 0] == 0).all() for gradient in gradients)
    assert padded.advantages is not None
    assert (padded.advantages[mask == 0] == 0).all()


@SEEDS
@EVERY_OBJECTIVE
def test_order_of_sequences_does_not_matter(
    objective: ComposedObjective, seed: int, random_vectors: RandomVectors, rows_of: RowsOf
) -> None:
    vectors = random_vectors(seed)
    order = torch.randperm(len(vectors.batch), generator=torch.Generator().manual_seed(seed))
    shuffled = rows_of(vectors, order.tolist())
    metrics, gradients = evaluate(objective, with_advantages(objective, vectors))
    expected = metrics, [gradient[order] for gradient in gradients]
    assert_same(evaluate(objective, with_advantages(objective, shuffled)), expected)


@SEEDS
@EVERY_OBJECTIVE
def test_split_over_ranks_and_micro_batches_does_not_matter(
    objective: ComposedObjective, seed: int, random_vectors: RandomVectors, rows_of: RowsOf, on_ranks: OnRanks
) -> None:
    vectors = random_vectors(seed)
    ranks = [list(range(8)), list(range(8, 12))]  # whole groups; unequal on purpose
    parts = on_ranks(objective.advantages, [rows_of(vectors, rows).batch for rows in ranks])

    expected_metrics, expected_gradients = evaluate(objective, with_advantages(objective, vectors))
    batch = vectors.batch
    for rows, (advantages, returns) in zip(ranks, parts, strict=True):
        width = advantages.shape[1]
        assert_same(advantages, batch.advantages[rows, :width])
        assert_same(returns, None if batch.returns is None else batch.returns[rows, :width])

    batch.num_loss_tokens = batch.response_mask.sum().item()
    batch.num_loss_sequences = batch.response_mask.any(-1).sum().item()
    micro_batches = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9], [10, 11]]
    batch.num_shares = len(micro_batches)
    total = [torch.zeros_like(gradient) for gradient in expected_gradients]
    metrics = []
    for rows in micro_batches:
        part_metrics, gradients = evaluate(objective, rows_of(vectors, rows))
        metrics.append(part_metrics)
        for whole, gradient in zip(total, gradients, strict=True):
            whole[rows, : gradient.shape[1]] = gradient / len(micro_batches)
    assert_same(total, expected_gradients)
    found = {}
    for name in expected_metrics:
        values = torch.stack([m[name] for m in metrics])
        found[name] = values.max() if name.endswith("_max") else values.mean()
    assert_same(found, expected_metrics)


@EVERY_OBJECTIVE
def test_zero_advantage_gives_zero_policy_gradient(objective: ComposedObjective, random_vectors: RandomVectors) -> None:
    vectors = random_vectors(0)
    vectors.batch.advantages = torch.zeros_like(vectors.logps)
    vectors.batch.returns = torch.zeros_like(vectors.logps)
    _, (gradient, _, _) = evaluate(replace(objective, loss_kl=None), vectors)
    assert (gradient == 0).all()
    vectors.batch.advantages = vectors.batch.advantages + 1
    _, (gradient, _, _) = evaluate(replace(objective, loss_kl=None), vectors)
    assert (gradient != 0).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("jump", [50, 200])
@EVERY_OBJECTIVE
def test_extreme_log_ratios_stay_finite_in_float32(
    objective: ComposedObjective, jump: int, dtype: torch.dtype, random_vectors: RandomVectors
) -> None:
    vectors = random_vectors(1, dtype=dtype)
    batch = vectors.batch
    generator = torch.Generator().manual_seed(0)
    for name in ("old_logps", "ref_logps", "rollout_logps"):
        sign = torch.randint(0, 2, vectors.logps.shape, generator=generator) * 2 - 1
        setattr(batch, name, (batch.old_logps if name == "rollout_logps" else vectors.logps) + jump * sign)
    metrics, gradients = evaluate(objective, with_advantages(objective, vectors))
    assert batch.advantages.dtype == torch.float32
    assert all(x.isfinite().all() for x in [batch.advantages, *metrics.values(), *gradients])
    assert all(metric.dtype == torch.float32 for metric in metrics.values())


@pytest.mark.parametrize("name", [name for name, o in OBJECTIVES.items() if o.min_group_size > 1 and not o.reward_kl])
def test_equal_rewards_in_every_group_teach_nothing(name: str, random_vectors: RandomVectors) -> None:
    vectors = random_vectors(0, group_size=7, dtype=torch.float32)  # seven tenths over seven is not one tenth
    vectors.batch.rewards = vectors.batch.groups * 0.1
    vectors.batch.response_mask = torch.ones_like(vectors.batch.response_mask)
    vectors.batch.response_lengths = vectors.batch.response_mask.sum(-1).long()  # equal lengths, equal punishment
    assert (with_advantages(OBJECTIVES[name], vectors).batch.advantages == 0).all()


@EVERY_OBJECTIVE
def test_a_batch_without_a_single_token_is_worth_nothing(
    objective: ComposedObjective, random_vectors: RandomVectors
) -> None:
    vectors = random_vectors(0)
    vectors.batch.response_mask = torch.zeros_like(vectors.batch.response_mask)
    metrics, gradients = evaluate(objective, with_advantages(objective, vectors))
    assert all((x == 0).all() for x in [*metrics.values(), *gradients])


@pytest.mark.parametrize(
    "surrogate", [ClippedRatio(dual_clip=3.0), SequenceRatio(), CappedRatio(), SoftGate()], ids=type
)
def test_at_the_old_policy_every_surrogate_has_the_gradient_of_the_plain_one(
    surrogate: Surrogate, random_vectors: RandomVectors
) -> None:
    vectors = random_vectors(0)
    mask, advantages = vectors.batch.response_mask.bool(), torch.linspace(-2, 2, vectors.logps.numel()).double()
    advantages = torch.where(mask, advantages.view_as(vectors.logps), 0.0)
    if isinstance(surrogate, SequenceRatio):  # whose advantage is that of the response
        advantages = torch.where(mask, advantages[:, :1], 0.0)
    logps = torch.where(mask, vectors.logps, 0.0).requires_grad_()
    losses, clipped = surrogate(logps, logps.detach(), advantages, mask)
    assert not clipped.any()
    (gradient,) = torch.autograd.grad(losses[mask].sum(), logps)
    torch.testing.assert_close(gradient, -advantages)


def test_a_log_ratio_is_bounded_by_20_on_both_sides_without_a_gradient_beyond() -> None:
    logps = torch.tensor([-30.0, -19.5, 0.0, 19.5, 30.0], requires_grad=True)
    bounded = log_ratio(logps, torch.zeros(5))
    assert bounded.tolist() == [-20.0, -19.5, 0.0, 19.5, 20.0]
    bounded.sum().backward()
    assert logps.grad is not None
    assert logps.grad.tolist() == [0, 1, 1, 1, 0]


@pytest.mark.parametrize(
    ("aggregation", "of_one"),
    [
        (TokenMean(), 6.0),
        (SequenceMeanTokenMean(), 6.0),
        (SequenceMeanTokenSumNorm(max_tokens=3), 2.0),
    ],
)
def test_a_step_of_one_token_has_its_loss_and_one_of_none_has_none(aggregation: Aggregation, of_one: float) -> None:
    values = torch.tensor([[6.0, 9.0], [9.0, 9.0]])
    assert aggregation(values, batch_of(torch.tensor([[1.0, 0.0], [0.0, 0.0]]))) == of_one
    assert aggregation(values, batch_of(torch.zeros(2, 2))) == 0.0
