"""The loss that follows a teacher: against TRL's, run live, and by itself."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.conftest import save_policy
from tests.support.tensor_sizes import LargestOfWidth, MostAtOnceOfWidth
from tests.test_policy import make_batch
from tlt_lightning.objectives import GRPO, K1, K2, K3, Distillation, Divergence, KLPenalty
from tlt_lightning.policy import Teacher, load_policy, token_logps
from tlt_lightning.rollout import RolloutBatch
from tlt_lightning.training.networks import Networks, Reference

BETAS = [0.0, 0.1, 0.5, 0.9, 1.0]


def trl_loss(
    states: Tensor, teacher_states: Tensor, heads: list[Tensor], mask: Tensor, beta: float, t: float
) -> Tensor:
    trainer = pytest.importorskip("trl.trainer.distillation_trainer")
    count = mask.sum()
    return trainer._chunked_divergence_loss(
        states, teacher_states, *heads, mask, beta, num_items_in_batch=count, temperature=t
    )[0]


@pytest.mark.oracle
@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.parametrize("chunk_size", [1, 1000])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("beta", BETAS)
def test_chunks_have_the_loss_and_the_gradients_of_trl(
    beta: float, temperature: float, chunk_size: int, is_frozen: bool
) -> None:
    """Those of the head, too, but for one that is frozen, as LoRA leaves it."""
    torch.manual_seed(0)
    head, teacher_head = torch.nn.Linear(8, 40, bias=False), torch.nn.Linear(12, 40, bias=False)
    states, teacher_states = torch.randn(3, 5, 8, requires_grad=True), torch.randn(3, 5, 12)
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 0, 1, 0, 0], [0, 0, 0, 1, 1]])
    expected = trl_loss(states, teacher_states, [head.weight, teacher_head.weight], mask, beta, temperature)
    head.requires_grad_(not is_frozen)
    teacher = Teacher(teacher_states[mask.bool()], teacher_head.weight.detach(), None, Divergence(beta=beta))
    found = token_logps(
        head,
        states[mask.bool()],
        torch.zeros(int(mask.sum()), dtype=torch.long),
        temperature=temperature,
        chunk_size=chunk_size,
        teacher=teacher,
    )[2].mean()
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    learned = [states] if is_frozen else [states, head.weight]
    gradients = [torch.autograd.grad(loss, learned) for loss in (found, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-6)


@pytest.mark.oracle
@pytest.mark.parametrize("is_packed", [True, False])
@pytest.mark.parametrize("beta", BETAS)
def test_whole_models_have_the_loss_and_the_gradients_of_trl(
    beta: float, is_packed: bool, policy_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of two micro-batches with masked tokens, packed or padded; TRL reads each sequence alone."""
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    teacher_path = str(save_policy(tmp_path, seed=1, tie_word_embeddings=False, **shape))
    whole = make_batch([3, 5, 4], [6, 1, 9])
    whole.response_lengths, whole.response_mask[0, 2:4] = torch.tensor([6, 1, 9]), 0.0
    whole.advantages, whole.old_logps = torch.zeros_like(whole.rollout_logps), torch.zeros_like(whole.rollout_logps)
    whole.num_loss_tokens, whole.num_loss_sequences = whole.count_loss(range(3))
    if not is_packed:
        monkeypatch.setattr("tlt_lightning.policy.can_pack", lambda trunk: False)
    objective = Distillation(divergence=Divergence(beta=beta))
    policy = load_policy(policy_path)
    networks = Networks(policy, None, Reference(teacher_path, "sdpa"), objective.divergence)
    loss = torch.zeros(())
    for rows in ([0, 2], [1]):
        batch = whole.select(rows)
        tokens, _ = networks.forward(batch)
        batch.divergence = tokens.divergence
        output = objective.loss(batch, tokens.logps, tokens.entropy, None)
        output.loss.backward()
        loss = loss + output.loss.detach()
        torch.testing.assert_close(output.metrics["train/divergence"], output.loss.detach())
    found = [parameter.grad for parameter in policy.parameters()]
    policy.zero_grad()

    teacher = load_policy(teacher_path).eval()
    states = []
    for model in (policy, teacher):
        rows = []
        for row, (start, length) in enumerate(zip([3, 5, 4], [6, 1, 9], strict=True)):
            ids = whole.input_ids[row : row + 1, : start + length]
            read = model.model(input_ids=ids, use_cache=False).last_hidden_state[0, start - 1 : -1]
            rows.append(torch.nn.functional.pad(read, (0, 0, 0, 9 - length)))
        states.append(torch.stack(rows))
    heads = [model.lm_head.weight for model in (policy, teacher)]
    expected = trl_loss(states[0], states[1].detach(), heads, whole.response_mask.int(), beta, whole.temperature)
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-6, atol=1e-6)
    expected.backward()
    for gradient, parameter in zip(found, policy.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-4, atol=1e-6)


def scored(divergence: Tensor | None = None) -> tuple[RolloutBatch, Tensor]:
    batch = make_batch([3, 5, 4, 2], [6, 1, 9, 4])
    batch.rewards, batch.groups = torch.tensor([0.0, 1.0, 0.0, 1.0]), torch.tensor([0, 0, 1, 1])
    batch.rollout_logps = -torch.rand_like(batch.rollout_logps) * batch.response_mask
    batch.old_logps, batch.divergence = batch.rollout_logps.clone(), divergence
    logps = (batch.rollout_logps + 0.1).requires_grad_()
    return batch, logps


def loss_of(objective: GRPO | Distillation, divergence: Tensor | None = None) -> tuple[Tensor, Tensor]:
    batch, logps = scored(divergence)
    torch.manual_seed(0)
    batch.ref_logps = batch.rollout_logps - 0.3 * torch.rand_like(batch.rollout_logps)
    batch.advantages, _ = objective.advantages(batch, lambda x: x)
    output = objective.loss(batch, logps, torch.zeros_like(logps), None)
    gradient = torch.autograd.grad(output.loss, logps, allow_unused=True)[0] if output.loss.requires_grad else None
    return output.loss.detach(), torch.zeros_like(logps) if gradient is None else gradient


@pytest.mark.parametrize("reward_coef", [0.0, 0.5, 2.0])
def test_rewards_join_in_with_their_weight(reward_coef: float) -> None:
    torch.manual_seed(0)
    divergence = torch.rand(4, 9).requires_grad_()
    batch, _ = scored()
    grpo = loss_of(GRPO())
    loss, gradient = loss_of(Distillation(reward_coef=reward_coef), divergence)
    of_teacher = (divergence * batch.response_mask).sum() / batch.response_mask.sum()
    torch.testing.assert_close(loss, of_teacher.detach() + reward_coef * grpo[0])
    torch.testing.assert_close(gradient, reward_coef * grpo[1])


@pytest.mark.parametrize("estimator", [K1(), K2(), K3()])
def test_without_a_divergence_the_sampled_token_teaches_alone(estimator: object) -> None:
    penalty = KLPenalty(coef=1.0, estimator=estimator)
    with_advantages = loss_of(Distillation(divergence=None, loss_kl=penalty, reward_coef=1.0))
    torch.testing.assert_close(with_advantages, loss_of(GRPO(loss_kl=penalty)))
    alone = Distillation(divergence=None, loss_kl=penalty)
    assert alone.needs_reference
    assert not alone.needs_rewards
    batch, logps = scored()
    torch.manual_seed(0)
    batch.ref_logps = batch.rollout_logps - 0.3 * torch.rand_like(batch.rollout_logps)
    estimate = estimator(logps, batch.ref_logps) * batch.response_mask
    torch.testing.assert_close(loss_of(alone)[0], (estimate.sum() / batch.response_mask.sum()).detach())


@pytest.mark.parametrize(
    ("estimator", "expected"), [(K1(), "none"), (K2(), "reverse"), (K3(), "forward")], ids=["K1", "K2", "K3"]
)
def test_estimators_on_the_sampled_token_have_the_gradients_that_the_docs_name(estimator, expected: str) -> None:
    """Exactly, in expectation over a vocabulary of six."""
    torch.manual_seed(0)
    logits = torch.randn(6, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(6, dtype=torch.float64)
    logps, teacher_logps = logits.log_softmax(-1), teacher.log_softmax(-1)
    estimates = estimator(logps, teacher_logps)
    found = torch.autograd.grad((logps.exp().detach() * estimates).sum(), logits)[0]
    of = {"reverse": Divergence(beta=1.0), "forward": Divergence(beta=0.0)}
    if expected == "none":
        assert found.abs().max() < 1e-15
        return
    kl = of[expected](logits[None], teacher[None], 1.0).sum()
    torch.testing.assert_close(found, torch.autograd.grad(kl, logits)[0], rtol=0, atol=1e-14)


def test_what_hears_no_teacher_is_refused_and_what_needs_no_reward_says_so() -> None:
    with pytest.raises(ValueError, match="would not hear its teacher: give one of them, or take GRPO"):
        Distillation(divergence=None)
    assert Distillation().min_group_size == 1
    assert Distillation(correction=None).learns_off_policy
    assert Distillation(reward_coef=0.1).min_group_size == 2
    assert not Distillation(reward_coef=0.1, correction=None).learns_off_policy


def test_no_logits_are_larger_than_a_chunk_and_none_are_left_to_the_next() -> None:
    at_once = []
    for num_chunks in (2, 8):
        head, states = torch.nn.Linear(8, 4096, bias=False), torch.randn(8 * num_chunks, 8, requires_grad=True)
        teacher = Teacher(torch.randn(len(states), 6), torch.randn(4096, 6), None, Divergence(beta=0.5))
        targets = torch.zeros(len(states), dtype=torch.long)
        with LargestOfWidth(4096) as largest, MostAtOnceOfWidth(4096) as most:
            _, entropy, divergence = token_logps(head, states, targets, temperature=1.0, chunk_size=8, teacher=teacher)
            assert not entropy.requires_grad
            divergence.sum().backward()
        assert largest.rows == 8
        at_once.append(most.rows)
    assert at_once[1] == at_once[0]
