"""Log-probs and entropies of chosen tokens against autograd's of the textbook formula."""

import pytest
import torch
from torch import Tensor, nn

from tests.support.tensor_sizes import LargestOfWidth
from tlt_lightning.fused.logps import chosen_logps, is_frozen_linear, rows_per_chunk
from tlt_lightning.policy import token_logps

TEMPERATURE = 0.7


def textbook(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    logps = (logits.float() / TEMPERATURE).log_softmax(-1)
    return logps.gather(-1, targets[:, None]).squeeze(-1), -(logps.exp() * logps).sum(-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("in_loss", ["log-probs", "entropies", "both"])
def test_values_and_gradients_are_those_of_the_formula(dtype: torch.dtype, in_loss: str) -> None:
    torch.manual_seed(0)
    targets, weights = torch.randint(50, (9,)), torch.randn(2, 9)
    logits = (4 * torch.randn(9, 50)).to(dtype)
    results = []
    for compute in (lambda x: chosen_logps(x, targets, TEMPERATURE), lambda x: textbook(x, targets)):
        x = logits.clone().requires_grad_()
        logps, entropy = compute(x)
        parts = {"log-probs": logps * weights[0], "entropies": entropy * weights[1]}
        sum(part.sum() for name, part in parts.items() if in_loss in (name, "both")).backward()
        results.append((logps.detach(), entropy.detach(), x.grad))
    *values, gradients = zip(*results, strict=True)
    for pair in values:  # in float32 whatever the logits are in
        torch.testing.assert_close(*pair, rtol=1e-5, atol=1e-5)
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-6}
    torch.testing.assert_close(*gradients, **tolerance)


def test_tokens_that_cannot_be_chosen_leave_gradients_of_log_probs_numbers() -> None:
    logits = torch.randn(3, 8)
    logits[:, 5] = -torch.inf
    logits.requires_grad_()
    logps, _ = chosen_logps(logits, torch.tensor([0, 1, 2]), TEMPERATURE)
    logps.sum().backward()
    assert torch.isfinite(logps).all()
    assert torch.isfinite(logits.grad).all()
    assert (logits.grad[:, 5] == 0).all()


def test_logits_of_large_size_do_not_overflow() -> None:
    logps, entropy = chosen_logps(torch.tensor([[3e4, 0.0], [-3e4, -3e4]]), torch.tensor([1, 0]), 1.0)
    torch.testing.assert_close(logps, torch.tensor([-3e4, -0.6931472]))
    torch.testing.assert_close(entropy, torch.tensor([0.0, 0.6931472]), atol=5e-3, rtol=0)


def frozen_head(*, bias: bool = False) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(6, 50, bias=bias).requires_grad_(False)


@pytest.mark.parametrize("bias", [False, True])
def test_before_a_frozen_head_values_and_gradients_are_those_of_the_formula(bias: bool) -> None:
    head, targets = frozen_head(bias=bias), torch.randint(50, (9,))
    states, weights, results = 4 * torch.randn(9, 6), torch.randn(9), []
    settings = {"temperature": TEMPERATURE, "chunk_size": 4}
    for compute in (lambda x: token_logps(head, x, targets, **settings)[:2], lambda x: textbook(head(x), targets)):
        x = states.clone().requires_grad_()
        logps, entropy = compute(x)
        (logps * weights).sum().backward()
        results.append((logps.detach(), entropy.detach(), x.grad))
    for pair in zip(*results, strict=True):
        torch.testing.assert_close(*pair, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16], ids=str)
def test_under_autocast_a_frozen_head_computes_as_one_that_is_trained(weights: torch.dtype) -> None:
    head, targets, results = frozen_head().to(weights), torch.randint(50, (64,)), []
    states = torch.randn(64, 6).to(weights)
    for is_trained in (False, True):
        head.requires_grad_(is_trained)
        x = states.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            logps, entropy, _ = token_logps(head, x, targets, temperature=TEMPERATURE, chunk_size=40)
        logps.square().sum().backward()
        results.append((logps.detach(), entropy, x.grad))
    (*values, gradient), (*expected, other) = results
    assert all(torch.equal(*pair) for pair in zip(values, expected, strict=True))
    assert gradient.dtype == other.dtype == weights
    assert (gradient - other).float().norm() < 0.02 * other.float().norm()


def test_a_frozen_head_that_is_more_than_a_linear_layer_is_not_taken_for_one() -> None:
    class Scaled(nn.Linear):
        def forward(self, states: Tensor) -> Tensor:
            return 2 * super().forward(states)

    assert is_frozen_linear(frozen_head())
    assert not is_frozen_linear(Scaled(6, 50).requires_grad_(False))


def test_before_a_frozen_head_the_backward_pass_meets_no_vocabulary() -> None:
    states = torch.randn(9, 6, requires_grad=True)
    targets = torch.zeros(9, dtype=torch.long)
    rows = []
    for is_trained in (False, True):
        head = frozen_head().requires_grad_(is_trained)
        logps, *_ = token_logps(head, states, targets, temperature=1.0, chunk_size=4)
        with LargestOfWidth(50) as largest:
            logps.sum().backward()
        rows.append(largest.rows)
    assert rows[0] == 0 < rows[1]
    assert head.weight.grad is not None


def test_entropies_before_a_frozen_head_carry_gradients_where_the_loss_has_them() -> None:
    head, states, targets = frozen_head(), torch.randn(9, 6, requires_grad=True), torch.zeros(9, dtype=torch.long)
    settings = {"temperature": 1.0, "chunk_size": 4}
    assert not token_logps(head, states, targets, **settings)[1].requires_grad
    entropy = token_logps(head, states, targets, **settings, needs_entropy_grad=True)[1]
    entropy.sum().backward()
    assert states.grad.abs().sum() > 0


@pytest.mark.parametrize(
    ("vocab_size", "num_states"), [(600, 266_240), (49_152, 3072), (152_064, 1024), (262_144, 1024)]
)
def test_a_small_vocabulary_meets_more_states_at_a_time(vocab_size: int, num_states: int) -> None:
    assert rows_per_chunk(vocab_size) == num_states
