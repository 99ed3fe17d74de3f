"""Corrections, where older weights wrote a part of the text."""

from typing import Any

import pytest
import torch

from tlt_lightning.objectives import GRPO, MaskedImportance, TruncatedImportance
from tlt_lightning.rollout import RolloutBatch


def gradient(first: torch.Tensor, second: torch.Tensor, old_first: torch.Tensor, correction: Any) -> torch.Tensor:
    """The expected gradient of GRPO's loss over two-token texts whose first token older weights wrote."""
    texts = torch.tensor([[a, b] for a in range(3) for b in range(3)])
    rewards = torch.tensor([float(a * b + a) for a, b in texts.tolist()])
    old = old_first.log_softmax(-1)[texts[:, 0]]
    new = first.log_softmax(-1)[texts[:, 0]]
    last = second.log_softmax(-1)[texts[:, 0], texts[:, 1]]
    logps = torch.stack([new, last], 1)
    behaviour = torch.stack([old, last], 1).detach()
    zeros = torch.zeros(len(texts), dtype=torch.long)
    batch = RolloutBatch(
        input_ids=texts,
        prompt_lengths=zeros,
        response_mask=torch.ones(len(texts), 2),
        rollout_logps=behaviour,
        rewards=rewards,
        groups=zeros,
        policy_versions=zeros,
        truncated=zeros.bool(),
        old_logps=logps.detach(),
        advantages=(rewards * behaviour.sum(1).exp())[:, None].expand(-1, 2),  # each text as often as it is written
        num_loss_tokens=2.0,
        num_loss_sequences=1.0,
    )
    loss = GRPO(correction=correction).loss(batch, logps, torch.zeros_like(logps), None).loss
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, [first, second])])


def test_corrections_bring_partial_rollouts_closer_to_what_on_policy_learns() -> None:
    torch.manual_seed(0)
    first, second = torch.randn(3, requires_grad=True), torch.randn(3, 3, requires_grad=True)
    older = first.detach() + torch.tensor([0.3, 0.0, -0.3])
    exact = gradient(first, second, first.detach(), None)
    deviations = [
        float((gradient(first, second, older, correction) - exact).norm() / exact.norm())
        for correction in (None, TruncatedImportance(), TruncatedImportance(level="sequence", max_weight=9.0))
    ]
    uncorrected, by_token, by_sequence = deviations
    assert uncorrected > 1.5 * by_token  # what came before a token still has the older weights' frequencies
    assert by_token > 100 * by_sequence
    assert by_sequence < 1e-5


@pytest.mark.parametrize("correction", [MaskedImportance(keep_above=1.0), MaskedImportance(keep_below=1.0)], ids=str)
def test_a_weight_at_its_bound_is_kept(correction: MaskedImportance) -> None:
    logps, mask = torch.tensor([[-0.3, -2.0]]), torch.tensor([[True, True]])
    assert correction(logps, logps, mask).tolist() == [[1.0, 1.0]]
