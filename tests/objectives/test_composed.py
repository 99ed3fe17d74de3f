"""An objective of pieces: its metrics, its penalties, and what it refuses."""

import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tlt_lightning.objectives import (
    GAE,
    GRPO,
    K1,
    ClippedRatio,
    KLEstimator,
    KLPenalty,
    LeaveOneOut,
    MaskedImportance,
    MismatchCorrection,
    PlainPolicyGradient,
    ReinforcePlusPlus,
    Surrogate,
    TruncatedImportance,
)
from tlt_lightning.objectives.correction import effective_sample_size, importance_weights
from tlt_lightning.training.iteration_end import judge_weights
from tlt_lightning.training.micro_batches import end_step

RandomVectors = Callable[..., SimpleNamespace]


def test_kl_in_the_reward_lowers_the_score_of_its_sequence(random_vectors: RandomVectors) -> None:
    batch = random_vectors(0).batch
    batch.response_mask = torch.ones_like(batch.response_mask)
    penalty = 0.1 * (batch.old_logps - batch.ref_logps).sum(-1)
    plain, shaped = (
        LeaveOneOut(),
        GRPO(advantage=LeaveOneOut(), reward_kl=KLPenalty(coef=0.1, estimator=K1())),
    )
    expected, _ = plain(batch, batch.rewards - penalty, torch.zeros_like(batch.old_logps), lambda x: x)
    torch.testing.assert_close(shaped.advantages(batch, lambda x: x)[0], expected)


def test_the_mismatch_between_engine_and_trainer_is_logged_and_bounded(vectors: SimpleNamespace) -> None:
    batch = vectors.batch
    batch.advantages = torch.ones_like(vectors.logps)
    shift = torch.tensor([0.5, -0.5, 2.0, 0.0], dtype=torch.float64)[:, None]
    batch.rollout_logps = batch.old_logps - shift
    counts = batch.response_mask.sum(-1)
    metrics = GRPO().loss(batch, vectors.logps, vectors.entropy, None).metrics

    def mean(per_sequence: torch.Tensor) -> float:
        return ((per_sequence[:, 0] * counts).sum() / counts.sum()).item()

    assert metrics["mismatch/logp_abs_diff"].item() == pytest.approx(mean(shift.abs()))
    assert metrics["mismatch/kl"].item() == pytest.approx(mean(shift.exp() - 1 - shift))
    assert metrics["mismatch/is_weight_mean"].item() == pytest.approx(mean(shift.exp().clamp(max=2)))
    assert metrics["mismatch/ratio_max"].item() == pytest.approx(math.exp(2))
    surprise = -vectors.logps * batch.response_mask  # its entropy is 0
    assert metrics["mismatch/surprise_square"].item() == pytest.approx((surprise.square().sum() / counts.sum()).item())
    assert metrics["mismatch/truncated"].item() == pytest.approx(mean((shift > math.log(2)).double()))
    off = GRPO(correction=None).loss(batch, vectors.logps, vectors.entropy, None).metrics
    assert off["mismatch/ratio_max"].item() == pytest.approx(math.exp(2))
    assert "mismatch/is_weight_mean" not in off


@pytest.mark.parametrize(
    "correction",
    [
        TruncatedImportance(),
        TruncatedImportance(level="sequence", max_weight=3.0),
        MaskedImportance(),
        MaskedImportance(level="sequence", keep_above=0.0),
    ],
)
def test_the_effective_sample_is_that_of_the_weights_however_the_step_is_split(
    vectors: SimpleNamespace, correction: MismatchCorrection
) -> None:
    batch = vectors.batch
    batch.advantages = torch.ones_like(vectors.logps)
    batch.rollout_logps = batch.old_logps + 0.4 * torch.randn_like(vectors.logps)
    mask = batch.response_mask.bool()
    batch = replace(batch, num_loss_tokens=int(mask.sum()), num_loss_sequences=len(mask))
    objective = GRPO(correction=correction)
    parts = []
    for rows in ([0, 1], [2, 3]):
        part = batch.select(rows)
        longest = part.response_mask.shape[1]
        logps, entropy = vectors.logps[rows, :longest], vectors.entropy[rows, :longest]
        parts.append(objective.loss(part, logps, entropy, None).metrics)
    weights = correction(batch.old_logps, batch.rollout_logps, mask)[mask]
    whole = {name: value.item() for name, value in end_step(parts).items()}
    expected = weights.sum() ** 2 / (len(weights) * weights.square().sum())
    assert effective_sample_size(whole) == pytest.approx(expected.item())
    ratio = importance_weights(batch.old_logps, batch.rollout_logps, mask, correction.level)
    assert whole["mismatch/ratio_max"] == pytest.approx(ratio.max().item())


def test_a_rollout_that_its_weights_say_is_useless_ends_the_run() -> None:
    def metrics(mean: float, square: float) -> dict[str, float]:
        return {"mismatch/ratio_max": 9.0, "mismatch/is_weight_mean": mean, "mismatch/is_weight_square": square}

    fine = metrics(0.9, 0.9)
    judge_weights(fine, 1)
    assert fine["mismatch/effective_sample_size"] == pytest.approx(0.9)
    assert "mismatch/is_weight_square" not in fine
    for useless in (metrics(0.05, 0.1), metrics(0.0, 0.0)):
        with pytest.raises(RuntimeError, match=r"Iteration 2: .* at least 0\.1 must.*`quantization: null`"):
            judge_weights(useless, 2)
    nothing: dict[str, float] = {"mismatch/ratio_max": 0.0} | dict.fromkeys(list(metrics(0, 0))[1:], 0.0)
    judge_weights(nothing, 1)  # every response was left out of the loss
    assert "mismatch/effective_sample_size" not in nothing


@pytest.mark.parametrize(("temperature", "is_as_expected"), [(1.0, True), (1.2, False), (0.8, False)])
def test_only_tokens_from_the_policy_itself_surprise_it_as_its_entropy_says(
    random_vectors: RandomVectors, temperature: float, is_as_expected: bool
) -> None:
    batch = random_vectors(0, num_tokens=2000).batch
    generator = torch.Generator().manual_seed(1)
    logits = 2 * torch.randn(*batch.response_mask.shape, 5, generator=generator, dtype=torch.float64)
    logps = logits.log_softmax(-1)
    chances = (logits / temperature).softmax(-1).flatten(0, 1)
    tokens = torch.multinomial(chances, 1, generator=generator).view(*batch.response_mask.shape, 1)
    entropy = -(logps.exp() * logps).sum(-1)
    batch.advantages = torch.ones_like(entropy)
    metrics = GRPO().loss(batch, logps.gather(-1, tokens)[..., 0], entropy, None).metrics
    assert (abs(metrics["mismatch/surprise"].item()) < 0.03) == is_as_expected  # of 10,000 tokens, 0.01 each way


def test_kl_to_the_reference_is_logged_where_there_is_one(vectors: SimpleNamespace) -> None:
    batch = vectors.batch
    batch.advantages = torch.ones_like(vectors.logps)
    metrics = GRPO().loss(batch, vectors.logps, vectors.entropy, None).metrics
    assert metrics["train/kl"].item() == pytest.approx(0.008896329021294447)
    batch.ref_logps = None
    assert "train/kl" not in GRPO().loss(batch, vectors.logps, vectors.entropy, None).metrics


def test_approx_kl_is_zero_only_before_the_first_update(vectors: SimpleNamespace) -> None:
    batch = vectors.batch
    batch.advantages = torch.ones_like(vectors.logps)
    moved = GRPO().loss(batch, vectors.logps, vectors.entropy, None).metrics["train/approx_kl"]
    fresh = GRPO().loss(batch, batch.old_logps, vectors.entropy, None).metrics["train/approx_kl"]
    d = vectors.logps - batch.old_logps
    expected = ((d.exp() - 1 - d) * batch.response_mask).sum() / 16
    assert (moved.item(), fresh.item()) == (pytest.approx(expected.item()), 0)


def test_entropy_bonus_raises_the_entropy(vectors: SimpleNamespace) -> None:
    vectors.batch.advantages = torch.zeros_like(vectors.logps)
    entropy = torch.ones_like(vectors.logps).requires_grad_()
    GRPO(entropy_coef=0.5).loss(vectors.batch, vectors.logps, entropy, None).loss.backward()
    torch.testing.assert_close(entropy.grad, -0.5 * vectors.batch.response_mask / 16)


def test_an_objective_tells_the_trainer_what_its_pieces_need() -> None:
    assert (GRPO().min_group_size, ReinforcePlusPlus().min_group_size) == (2, 1)
    assert (GRPO().needs_entropy_grad, GRPO().needs_reference, GRPO().needs_critic) == (False, False, False)
    assert GRPO(entropy_coef=0.1).needs_entropy_grad
    assert GRPO(loss_kl=KLPenalty()).needs_reference
    assert GRPO(reward_kl=KLPenalty()).needs_reference
    needing = [GRPO(), GRPO(loss_kl=KLPenalty()), GRPO(reward_kl=KLPenalty())]
    assert [objective.needs_old_logps for objective in needing] == [False, False, True]


def test_pieces_are_given_zeros_where_masked(random_vectors: RandomVectors) -> None:
    vectors = random_vectors(0)
    batch, given = vectors.batch, list[torch.Tensor]()
    masked = batch.response_mask == 0
    for name in ("old_logps", "rollout_logps", "ref_logps", "advantages"):
        setattr(batch, name, torch.where(masked, torch.nan, vectors.logps))

    class Sees(Surrogate, MismatchCorrection, KLEstimator):
        def __call__(self, *tensors: torch.Tensor) -> Any:
            given.extend(each for each in tensors if each.is_floating_point())
            return (tensors[0], masked) if len(tensors) == 4 else tensors[0]

    objective = GRPO(surrogate=Sees(), correction=Sees(), loss_kl=KLPenalty(estimator=Sees()))
    objective.loss(batch, vectors.logps, vectors.entropy, None)
    assert len(given) == 3 + 2 + 2 + 2  # the correction a second time, for its metrics
    assert all((each[masked] == 0).all() for each in given)


@pytest.mark.parametrize("missing", ["old_logps", "advantages", "ref_logps"])
def test_a_missing_tensor_is_named(missing: str, vectors: SimpleNamespace) -> None:
    vectors.batch.advantages = torch.ones_like(vectors.logps)
    setattr(vectors.batch, missing, None)
    with pytest.raises(ValueError, match=f"`batch.{missing}` is None"):
        GRPO(loss_kl=KLPenalty()).loss(vectors.batch, vectors.logps, vectors.entropy, None)


def test_an_advantage_that_needs_a_critic_is_refused_without_one() -> None:
    with pytest.raises(ValueError, match=r"GAE needs a critic, and GRPO trains none.* as `GroupNormalized`"):
        GRPO(advantage=GAE())


def test_reinforce_descends_the_advantage_times_the_log_prob(vectors: SimpleNamespace) -> None:
    advantages = torch.linspace(-1, 1, 24, dtype=torch.float64).view(4, 6)
    mask = vectors.batch.response_mask.bool()
    loss, clipped = PlainPolicyGradient()(vectors.logps, vectors.batch.old_logps, advantages, mask)
    torch.testing.assert_close(loss, -advantages * vectors.logps)
    assert not clipped.any()


def test_the_dual_clip_counts_as_clipped() -> None:
    ratios, advantages = torch.tensor([[0.5, 1.1, 2.9, 3.1, 3.1]]), torch.tensor([[-1.0, -1, -1, -1, 1]])
    mask = torch.ones_like(ratios).bool()
    loss, clipped = ClippedRatio(dual_clip=3.0)(ratios.log(), torch.zeros_like(ratios), advantages, mask)
    torch.testing.assert_close(loss, torch.tensor([[0.8, 1.1, 2.9, 3.0, -1.28]]))
    assert clipped.tolist() == [[True, False, False, True, True]]


@pytest.mark.parametrize(("weight", "kept"), [(0.49, 0), (0.51, 0.51), (4.9, 4.9), (5.1, 0)])
def test_icepop_keeps_weights_from_a_half_to_five(weight: float, kept: float) -> None:
    old_logps, mask = torch.tensor([[weight]], dtype=torch.float64).log(), torch.ones(1, 1, dtype=torch.bool)
    assert MaskedImportance()(old_logps, torch.zeros_like(old_logps), mask).item() == pytest.approx(kept)
