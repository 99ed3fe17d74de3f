"""The divergence of two sets of logits, against its definition."""

import pytest
import torch

from tlt_lightning.fused.divergence import generalized_jsd

BETAS = [0.0, 0.1, 0.5, 0.9, 1.0]


def textbook(logits: torch.Tensor, others: torch.Tensor, temperature: float, beta: float) -> torch.Tensor:
    own, other = (each.div(temperature).softmax(-1) for each in (logits, others))
    mixture = (1 - beta) * own + beta * other

    def kl(one: torch.Tensor, two: torch.Tensor) -> torch.Tensor:
        return (one * (one.log() - two.log())).sum(-1)

    if beta in (0, 1):
        return kl(own, other) if beta else kl(other, own)
    return beta * kl(other, mixture) + (1 - beta) * kl(own, mixture)


def pair(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return (3 * torch.randn(5, 11, dtype=dtype)).requires_grad_(), 3 * torch.randn(5, 11, dtype=dtype)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("beta", BETAS)
def test_values_and_gradients_are_those_of_the_definition(beta: float, temperature: float) -> None:
    logits, others = pair()
    expected = textbook(logits, others, temperature, beta)
    found = generalized_jsd(logits, others, temperature, beta)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    assert torch.autograd.gradcheck(lambda x: generalized_jsd(x, others, temperature, beta), logits)
    weights = torch.randn(5, dtype=torch.float64)
    gradients = [torch.autograd.grad((each * weights).sum(), logits)[0] for each in (found, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("beta", BETAS)
def test_half_precision_is_computed_in_float32_and_is_zero_for_equals(beta: float) -> None:
    logits, others = (each.detach().bfloat16() for each in pair())
    divergence = generalized_jsd(logits.requires_grad_(), others, 1.0, beta)
    assert divergence.dtype == torch.float32
    torch.testing.assert_close(divergence, textbook(logits.float(), others.float(), 1.0, beta))
    assert torch.autograd.grad(divergence.sum(), logits)[0].dtype == torch.bfloat16
    torch.testing.assert_close(generalized_jsd(others, others, 1.0, beta), torch.zeros(5), rtol=0, atol=1e-6)


@pytest.mark.parametrize("beta", BETAS)
def test_the_unlikeliest_tokens_leave_it_finite(beta: float) -> None:
    logits, others = torch.tensor([[200.0, 0.0, -200.0]]).requires_grad_(), torch.tensor([[-200.0, 0.0, 200.0]])
    divergence = generalized_jsd(logits, others, 1.0, beta)
    assert divergence.isfinite().all()
    assert torch.autograd.grad(divergence.sum(), logits)[0].isfinite().all()
