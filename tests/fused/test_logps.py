"""Log-probs and entropies of chosen tokens against autograd's of the textbook formula."""

import pytest
import torch
from torch import Tensor

from tlt_lightning.fused.logps import chosen_logps

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
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-6}
    for pair in zip(*results, strict=True):
        torch.testing.assert_close(*pair, **tolerance)


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
