"""What the ratio is clipped against: the policy before the update, or the one that wrote the text."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from statistics import NormalDist
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conftest import Paths
from tests.objectives.conftest import batch_of
from tests.support.rl_runs import make_data, make_module, make_trainer
from tlt_lightning.objectives import (
    GRPO,
    GSPO,
    K1,
    K2,
    K3,
    BehaviourPolicy,
    CappedRatio,
    ClippedRatio,
    KLEstimator,
    MaskedImportance,
    OldPolicy,
    PlainPolicyGradient,
    SequenceRatio,
    TruncatedImportance,
)
from tlt_lightning.objectives.correction import effective_sample_size
from tlt_lightning.training.micro_batches import end_step

RandomVectors = Callable[..., SimpleNamespace]


def scored(vectors: SimpleNamespace) -> SimpleNamespace:
    """Give each token an advantage of its own."""
    mask = vectors.batch.response_mask
    generator = torch.Generator().manual_seed(0)
    vectors.batch.advantages = mask * torch.randn(mask.shape, generator=generator, dtype=mask.dtype)
    return vectors


def loss_and_gradient(function: Callable[[Tensor], Tensor], logps: Tensor) -> tuple[Tensor, Tensor]:
    logps = logps.detach().requires_grad_()
    loss = function(logps)
    loss.backward()
    assert logps.grad is not None
    return loss.detach(), logps.grad


def async_trl(vectors: SimpleNamespace, logps: Tensor) -> tuple[Tensor, float]:
    """The loss of TRL's asynchronous trainer and the share of tokens that it says are clipped."""
    trainer = pytest.importorskip("trl.experimental.async_grpo.async_grpo_trainer").AsyncGRPOTrainer
    batch = vectors.batch
    mask = batch.response_mask.bool()
    number, count = torch.arange(mask.numel()), int(mask.sum())
    outputs = SimpleNamespace(log_probs=logps, entropy=vectors.entropy)
    stub = SimpleNamespace(
        _metrics={"train": defaultdict(list)},
        **{
            f"_step_{name}": 0.0
            for name in ("forward_tokens", "trained_tokens", "seq_len_weighted", "samples", "forward_s")
        },
        accelerator=SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x),
        aux_loss_enabled=False,
        current_gradient_accumulation_steps=1,
        epsilon_low=0.2,
        epsilon_high=0.28,
    )
    row = {name: torch.ones(1, mask.numel()) for name in ("input_ids", "position_ids", "shift_labels")}
    inputs = {
        **row,
        "attention_mask": torch.ones(1, mask.numel()),
        "token_index": torch.where(mask.flatten(), number, -1)[None],
        "old_log_probs": batch.rollout_logps.reshape(1, -1),
        "advantages": batch.advantages.reshape(1, -1),
        "segment_id": torch.arange(len(mask)).repeat_interleave(mask.shape[1])[None],
        **{name: torch.full((1, 1), -1) for name in ("tree_kv_index", "tree_cu_seqlens_q", "tree_cu_seqlens_k")},
        "tree_max_seqlens": torch.ones(1, 2, dtype=torch.long),
        **{name: torch.tensor([float(count)]) for name in ("global_n_tokens", "n_forward_tokens", "mean_seq_len")},
        "global_n_forward_tokens": torch.tensor([float(count)]),
    }
    loss = trainer.compute_loss(stub, lambda **_: outputs, inputs)
    return loss, stub._metrics["train"]["clip_ratio/region_mean"][0]


@pytest.mark.oracle
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_clipping_against_the_writer_is_the_loss_of_trls_asynchronous_trainer(
    seed: int, random_vectors: RandomVectors
) -> None:
    vectors = scored(random_vectors(seed))
    objective = GRPO(proximal=BehaviourPolicy())
    metrics: dict[str, Tensor] = {}

    def ours(logps: Tensor) -> Tensor:
        output = objective.loss(vectors.batch, logps, vectors.entropy, None)
        metrics.update(output.metrics)
        return output.loss

    clipped: list[float] = []

    def trls(logps: Tensor) -> Tensor:
        loss, share = async_trl(vectors, logps)
        clipped.append(share)
        return loss

    expected = loss_and_gradient(trls, vectors.logps)
    torch.testing.assert_close(loss_and_gradient(ours, vectors.logps), expected, atol=1e-6, rtol=1e-6)
    assert expected[1].abs().sum() > 0
    assert 0.1 < clipped[0] == pytest.approx(metrics["train/clip_fraction"].item(), abs=1e-6)


@pytest.mark.parametrize("seed", [0, 1])
def test_decoupled_is_the_loss_of_areal(seed: int, random_vectors: RandomVectors) -> None:
    """arXiv 2505.24298, Eq. 5, token by token; weights above a cap are dropped, as AReaL's code does."""
    vectors = scored(random_vectors(seed))
    batch, mask = vectors.batch, vectors.batch.response_mask.bool()

    def areal(logps: Tensor) -> Tensor:
        total = torch.zeros((), dtype=logps.dtype)
        for i, t in mask.nonzero().tolist():
            advantage, proximal = batch.advantages[i, t], batch.old_logps[i, t]
            weight = (proximal - batch.rollout_logps[i, t]).exp()
            ratio = (logps[i, t] - proximal).exp()
            if weight <= 1.2:
                total = total + weight * torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
        return -total / mask.sum()

    expected = loss_and_gradient(areal, vectors.logps)
    for proximal in (OldPolicy(), None):
        objective = GRPO(proximal=proximal, correction=MaskedImportance(keep_above=0.0, keep_below=1.2))
        found = loss_and_gradient(lambda x, o=objective: o.loss(batch, x, vectors.entropy, None).loss, vectors.logps)
        torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-12)
    assert ((batch.old_logps - batch.rollout_logps)[mask].exp() > 1.2).any()


def test_of_text_half_a_nat_off_one_step_clips_nothing_but_against_its_writer() -> None:
    """log(policy / writer) has mean -1/8 and deviation 1/2, so that the ratio's mean over the writer's tokens is 1."""
    generator, size = torch.Generator().manual_seed(0), (40, 5000)
    log_ratios = 0.5 * torch.randn(size, generator=generator) - 0.125
    batch = batch_of(torch.ones(size), rollout_logps=-log_ratios - 1, old_logps=torch.full(size, -1.0))
    batch.advantages = torch.randint(0, 2, size, generator=generator) * 2.0 - 1
    logps = batch.old_logps  # of the only step, whose policy is the old one
    old, behaviour = (
        GRPO(proximal=proximal).loss(batch, logps, torch.zeros(size), None).metrics
        for proximal in (OldPolicy(), BehaviourPolicy())
    )
    normal = NormalDist(-0.125, 0.5)
    cut = normal.cdf(-torch.tensor(1.25).log().item()), 1 - normal.cdf(torch.tensor(1.28).log().item())
    assert old["train/clip_fraction"] == 0
    assert behaviour["train/clip_fraction"].item() == pytest.approx(sum(cut) / 2, abs=0.003)  # 32.5%
    for metrics in (old, behaviour):  # the mismatch is the same, whoever makes up for it
        truncated = 1 - normal.cdf(torch.tensor(2.0).log().item())
        assert metrics["mismatch/truncated"].item() == pytest.approx(truncated, abs=0.001)  # 5.1%
        assert metrics["mismatch/kl"].item() == pytest.approx(0.125, abs=0.003)
        share = effective_sample_size({name: value.item() for name, value in end_step([metrics]).items()})
        assert share == pytest.approx(0.824, abs=0.002)  # E[min(w, 2)]^2 / E[min(w, 2)^2] of the log-normal
    assert behaviour["train/approx_kl"].item() == pytest.approx(0.125, abs=0.003)


def test_rounding_alone_is_clipped_by_the_range_of_a_response_s_mean() -> None:
    """An engine in 16 bit is 0.003 off in the mean, which is 0.004 in deviation and 0.0006 over 40 tokens."""
    generator, size = torch.Generator().manual_seed(0), (4000, 40)
    off = 0.004 * torch.randn(size, generator=generator)
    batch = batch_of(torch.ones(size), rollout_logps=-1 - off, old_logps=torch.full(size, -1.0))
    batch.advantages = torch.randint(0, 2, (len(off), 1), generator=generator).expand(size) * 2.0 - 1
    wide = SequenceRatio(sequence_clip_low=3e-3, sequence_clip_high=4e-3)
    clipped = {
        name: objective.loss(batch, batch.old_logps, torch.zeros(size), None).metrics["train/clip_fraction"].item()
        for name, objective in {
            "GSPO": GSPO(proximal=BehaviourPolicy()),
            "old": GSPO(proximal=OldPolicy()),
            "wide": GSPO(proximal=BehaviourPolicy(), surrogate=wide),
            "GRPO": GRPO(proximal=BehaviourPolicy()),
        }.items()
    }
    normal = NormalDist(0, 0.004 / 40**0.5)
    assert clipped["GSPO"] == pytest.approx((normal.cdf(-3e-4) + normal.cdf(-4e-4)) / 2, abs=0.02)  # 29%
    assert clipped["old"] == clipped["wide"] == clipped["GRPO"] == 0


def test_weights_that_nothing_has_are_not_measured_by_the_sequence(vectors: SimpleNamespace) -> None:
    """Long responses would have a tiny effective sample, for which the run would end."""
    vectors.batch.advantages = torch.ones_like(vectors.logps)
    by_level = [
        GRPO(proximal=BehaviourPolicy(), correction=TruncatedImportance(level=level)).loss(
            vectors.batch, vectors.logps, vectors.entropy, None
        )
        for level in ("token", "sequence")
    ]
    assert by_level[0].loss == by_level[1].loss
    assert by_level[0].metrics == by_level[1].metrics


def test_the_ratio_alone_makes_up_for_the_age_of_the_text(random_vectors: RandomVectors) -> None:
    """Uncapped, its expected gradient over the writer's tokens is that of the policy's own, for any old policy."""
    generator = torch.Generator().manual_seed(3)
    advantages = torch.randn(6, generator=generator, dtype=torch.float64)
    logits = torch.randn(6, generator=generator, dtype=torch.float64).requires_grad_()
    writer, old = (torch.randn(6, generator=generator, dtype=torch.float64).log_softmax(-1) for _ in range(2))
    (expected,) = torch.autograd.grad(-(logits.softmax(-1) * advantages).sum(), logits)
    surrogates = (CappedRatio(max_ratio=1e6), ClippedRatio(clip_low=1.0, clip_high=1e6))
    for surrogate in surrogates:
        objective = GRPO(proximal=BehaviourPolicy(), surrogate=surrogate, correction=None)
        batch = batch_of(torch.ones(6, 1, dtype=torch.float64), rollout_logps=writer[:, None], old_logps=old[:, None])
        batch.advantages = (writer.exp() * 6 * advantages)[:, None]  # each token as often as it is written
        logps = logits.log_softmax(-1)[:, None]
        loss = objective.loss(batch, logps, torch.zeros_like(logps), None).loss
        torch.testing.assert_close(torch.autograd.grad(loss, logits)[0], expected)


def test_a_loss_without_a_ratio_keeps_its_weights_whatever_the_proximal_policy(random_vectors: RandomVectors) -> None:
    vectors = scored(random_vectors(0))
    losses = [
        loss_and_gradient(
            lambda x, p=proximal: (
                GRPO(surrogate=PlainPolicyGradient(), proximal=p).loss(vectors.batch, x, vectors.entropy, None).loss
            ),
            vectors.logps,
        )
        for proximal in (OldPolicy(), BehaviourPolicy())
    ]
    torch.testing.assert_close(losses[0], losses[1], atol=0, rtol=0)


def test_an_asynchronous_schedule_clips_against_the_writer_unless_the_objective_says_otherwise(
    random_vectors: RandomVectors,
) -> None:
    vectors = scored(random_vectors(0))

    def loss(asynchronous: bool, **settings: Any) -> float:
        batch = replace(vectors.batch, asynchronous=asynchronous)
        return GRPO(**settings).loss(batch, vectors.logps, vectors.entropy, None).loss.item()

    old, behaviour = (loss(False, proximal=each) for each in (OldPolicy(), BehaviourPolicy()))
    assert old != behaviour
    assert (loss(False), loss(True), loss(True, proximal=OldPolicy())) == (old, behaviour, old)
    assert GRPO().clips_behaviour(asynchronous=True)
    assert not GRPO().clips_behaviour(asynchronous=False)
    assert not GRPO(surrogate=PlainPolicyGradient()).clips_behaviour(asynchronous=True)


REVERSE, FORWARD, NONE = "KL(policy || reference)", "KL(reference || policy)", "nothing"


@pytest.mark.parametrize(
    ("estimator", "descends"),
    [(K1(), NONE), (K2(), REVERSE), (K3(), FORWARD)],
)
def test_which_kl_an_estimator_descends_as_a_loss(estimator: KLEstimator, descends: str) -> None:
    """The expectation over six tokens of the loss's gradient, exactly, beside the gradients of the two KLs."""
    generator = torch.Generator().manual_seed(0)
    logits, reference = torch.randn(2, 6, generator=generator, dtype=torch.float64)
    logits, reference = logits.requires_grad_(), reference.log_softmax(-1)
    logps = logits.log_softmax(-1)
    kls = {
        REVERSE: (logps.exp() * (logps - reference)).sum(),
        FORWARD: (reference.exp() * (reference - logps)).sum(),
        NONE: 0 * logits.sum(),
    }
    expected = {name: torch.autograd.grad(kl, logits, retain_graph=True)[0] for name, kl in kls.items()}
    (found,) = torch.autograd.grad((logps.detach().exp() * estimator(logps, reference)).sum(), logits)
    same = [name for name, gradient in expected.items() if torch.allclose(found, gradient, atol=1e-15, rtol=0)]
    assert same == [descends]


@pytest.mark.parametrize("proximal", [OldPolicy(), BehaviourPolicy()])
def test_steps_away_from_the_text_are_not_called_an_engine_of_another_policy(
    proximal: OldPolicy | BehaviourPolicy, paths: Paths, caplog: pytest.LogCaptureFixture
) -> None:
    policy, prompts, folder = paths
    module = make_module(policy, objective=GRPO(proximal=proximal), optimizer=lambda p: torch.optim.SGD(p, lr=30.0))
    trainer = make_trainer(folder, max_epochs=1)
    trainer.fit(module, make_data(prompts))
    assert (float(trainer.callback_metrics["mismatch/kl"]) > 0.02) == isinstance(proximal, BehaviourPolicy)
    assert "samples from another policy" not in caplog.text
