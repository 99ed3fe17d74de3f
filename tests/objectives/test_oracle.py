"""Our losses against TRL's own, run live on random batches."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tlt_lightning.objectives import (
    GRPO,
    CappedRatio,
    ComposedObjective,
    GroupNormalized,
    KLPenalty,
    MaskedImportance,
    MismatchCorrection,
    SequenceMeanTokenMean,
    SequenceMeanTokenSumNorm,
    SequenceRatio,
    SoftGate,
    TokenMean,
    TruncatedImportance,
)

pytestmark = pytest.mark.oracle

MAX_TOKENS = 9
PIECES: dict[str, dict[str, Any]] = {
    "grpo": {"aggregation": SequenceMeanTokenMean()},
    "bnpo": {"aggregation": TokenMean()},
    "dapo": {"aggregation": TokenMean()},
    "dr_grpo": {"aggregation": SequenceMeanTokenSumNorm(max_tokens=MAX_TOKENS)},
    "gspo": {
        "aggregation": SequenceMeanTokenMean(),
        "surrogate": SequenceRatio(sequence_clip_low=0.05, sequence_clip_high=0.06),
    },
    "cispo": {"aggregation": TokenMean(), "surrogate": CappedRatio(max_ratio=5.0)},
    "sapo": {"aggregation": SequenceMeanTokenMean(), "surrogate": SoftGate()},
}
CORRECTIONS: dict[str, MismatchCorrection | None] = {
    "none": None,
    "token_truncate": TruncatedImportance(level="token", max_weight=1.3),
    "sequence_truncate": TruncatedImportance(level="sequence", max_weight=1.3),
    "token_mask": MaskedImportance(level="token", keep_above=0.7, keep_below=1.3),
    "sequence_mask": MaskedImportance(level="sequence", keep_above=0.5, keep_below=2.0),
}
# With one ratio per sequence TRL lets each token's gradient carry the mean weight, verl and we its own.
CASES = [
    (loss_type, mode) for loss_type in PIECES for mode in CORRECTIONS if (loss_type, mode[:5]) != ("gspo", "token")
]


def trl_weights(vectors: SimpleNamespace, mode: str) -> Tensor:
    """What TRL computes while generating, in a method too large to call."""
    batch = vectors.batch
    difference = (batch.old_logps - batch.rollout_logps) * batch.response_mask
    if mode.startswith("sequence"):
        difference = difference.sum(-1, keepdim=True)
    weights, correction = difference.exp(), CORRECTIONS[mode]
    if isinstance(correction, MaskedImportance):
        return weights.masked_fill((weights < correction.keep_above) | (weights > correction.keep_below), 0.0)
    assert isinstance(correction, TruncatedImportance)
    return weights.clamp(max=correction.max_weight)


def trl_loss(
    vectors: SimpleNamespace,
    loss_type: str,
    *,
    beta: float = 0.0,
    mode: str = "none",
    entropy_coef: float = 0.0,
    num_items: float | None = None,
    accumulation: int = 1,
) -> Tensor:
    trainer = pytest.importorskip("trl.trainer.grpo_trainer").GRPOTrainer
    batch, logps = vectors.batch, vectors.logps
    clip_low, clip_high = {"gspo": (0.05, 0.06), "cispo": (0.2, 5.0)}.get(loss_type, (0.2, 0.28))
    stub = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (logps, vectors.entropy, None),
        _entropy_bonus_enabled=entropy_coef != 0,
        _metrics={"train": defaultdict(list)},
        accelerator=SimpleNamespace(
            num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x, sync_gradients=False
        ),
        args=SimpleNamespace(
            delta=None,
            sapo_temperature_neg=1.05,
            sapo_temperature_pos=1.0,
            steps_per_generation=accumulation,
            use_bias_correction_kl=False,
        ),
        aux_loss_enabled=False,
        beta=beta,
        current_gradient_accumulation_steps=accumulation,
        entropy_coef=entropy_coef,
        epsilon_high=clip_high,
        epsilon_low=clip_low,
        importance_sampling_level="sequence" if loss_type == "gspo" else "token",
        loss_type="grpo" if loss_type == "gspo" else loss_type,
        max_completion_length=MAX_TOKENS,
        model=SimpleNamespace(training=True),
        off_policy_mask_threshold=None,
        top_entropy_quantile=1.0,
        use_adaptive_entropy=False,
        use_vllm=mode != "none",
        vllm_importance_sampling_correction=mode != "none",
    )
    inputs = {
        "advantages": vectors.scores,
        "completion_ids": batch.input_ids[:, 1:],
        "completion_mask": batch.response_mask,
        "num_items_in_batch": torch.tensor(num_items or batch.response_mask.sum().item()),
        "old_per_token_logps": batch.old_logps,
        "prompt_ids": batch.input_ids[:, :1],
        "prompt_mask": torch.ones_like(batch.input_ids[:, :1]),
        "ref_per_token_logps": batch.ref_logps,
    }
    if mode != "none":
        inputs["importance_sampling_ratio"] = trl_weights(vectors, mode)
    return trainer._compute_loss(stub, None, inputs)


def scored(vectors: SimpleNamespace) -> SimpleNamespace:
    """Add advantages for both: TRL wants one per sequence. The last group's are all zero."""
    batch = vectors.batch
    batch.num_loss_sequences = float(len(batch))  # TRL also counts the sequence that is masked out
    zeros, ones = torch.zeros_like(vectors.logps), torch.ones_like(batch.response_mask)
    everywhere, _ = GroupNormalized()(replace(batch, response_mask=ones), batch.rewards, zeros, lambda x: x)
    vectors.scores, batch.advantages = everywhere[:, 0], everywhere * batch.response_mask
    return vectors


def assert_same_loss_and_gradient(ours: Callable[[Tensor], Tensor], vectors: SimpleNamespace, **settings: Any) -> None:
    results = []
    for function in (lambda _: trl_loss(vectors, **settings), ours):
        vectors.logps = vectors.logps.detach().requires_grad_()
        loss = function(vectors.logps)
        loss.backward()
        results.append((loss.detach(), vectors.logps.grad))
    torch.testing.assert_close(results[1], results[0], atol=1e-6, rtol=1e-6)
    assert results[0][1].abs().sum() > 0


def our_loss(objective: ComposedObjective, vectors: SimpleNamespace) -> Callable[[Tensor], Tensor]:
    return lambda logps: objective.loss(vectors.batch, logps, vectors.entropy, None).loss


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("beta", [0.0, 0.04])
@pytest.mark.parametrize(("loss_type", "mode"), CASES)
def test_loss_and_gradient_are_those_of_trl(
    loss_type: str, beta: float, mode: str, seed: int, random_vectors: Callable[..., SimpleNamespace]
) -> None:
    vectors = scored(random_vectors(seed))
    kl = KLPenalty(coef=beta) if beta else None
    objective = GRPO(**PIECES[loss_type], correction=CORRECTIONS[mode], loss_kl=kl)
    assert_same_loss_and_gradient(our_loss(objective, vectors), vectors, loss_type=loss_type, beta=beta, mode=mode)


@pytest.mark.parametrize("loss_type", PIECES)
def test_extreme_ratios_are_those_of_trl(loss_type: str, random_vectors: Callable[..., SimpleNamespace]) -> None:
    vectors = scored(random_vectors(5))
    batch = vectors.batch
    # Up to e^15 where TRL's loss is unbounded (negative advantage, rising ratio), which is below our clamp.
    highest = torch.where(vectors.scores < 0, 15.0, 50.0)[:, None]
    jumps = torch.randint(-1, 2, batch.old_logps.shape, generator=torch.Generator().manual_seed(0)) * 50.0
    batch.old_logps = vectors.logps - jumps.minimum(highest).double()
    objective = GRPO(**PIECES[loss_type], correction=None)
    assert_same_loss_and_gradient(our_loss(objective, vectors), vectors, loss_type=loss_type)


def test_entropy_bonus_is_that_of_trl(random_vectors: Callable[..., SimpleNamespace]) -> None:
    vectors = scored(random_vectors(2))
    objective = GRPO(**PIECES["dr_grpo"], correction=None, entropy_coef=0.3)
    assert_same_loss_and_gradient(our_loss(objective, vectors), vectors, loss_type="dr_grpo", entropy_coef=0.3)


def test_accumulated_token_mean_is_that_of_trl(
    random_vectors: Callable[..., SimpleNamespace], rows_of: Callable[..., SimpleNamespace]
) -> None:
    vectors = scored(random_vectors(3))
    vectors.batch.num_loss_tokens = vectors.batch.response_mask.sum().item()
    vectors.batch.num_shares = 2
    objective = GRPO(correction=None)
    ours, trl = [], []
    for rows in ([0, 1, 2, 3, 4], [5, 6, 7, 8, 9, 10, 11]):
        part = rows_of(vectors, rows)
        ours.append(our_loss(objective, part)(part.logps))
        trl.append(trl_loss(part, "dapo", num_items=vectors.batch.num_loss_tokens, accumulation=2))
    # Lightning averages the micro-batches, TRL adds them up.
    torch.testing.assert_close(torch.stack(ours).mean(), torch.stack(trl).sum(), atol=1e-6, rtol=1e-6)
