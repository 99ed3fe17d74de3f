"""How far a policy's next token is from a teacher's."""

import itertools

import pytest
import torch

from tlt_lightning.objectives import Divergence

EVERY = [Divergence(beta=beta) for beta in (0.0, 0.5, 1.0)]


def logits(seed: int, width: int = 12) -> torch.Tensor:
    return 2 * torch.randn(6, width, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_top_k_counts_all_other_tokens_as_one(beta: float, temperature: float) -> None:
    own, teacher = logits(0).requires_grad_(), logits(1)
    kept = teacher.topk(3).indices
    grouped = []
    for each in (own, teacher):
        probs = (each / temperature).softmax(-1)
        likely = probs.gather(-1, kept)
        grouped.append(temperature * torch.cat([likely, 1 - likely.sum(-1, keepdim=True)], -1).log())
    divergence = Divergence(beta=beta, top_k=3)
    expected = Divergence(beta=beta)(*grouped, temperature)
    torch.testing.assert_close(divergence(own, teacher, temperature), expected, rtol=1e-9, atol=1e-12)
    assert torch.autograd.gradcheck(lambda x: divergence(x, teacher, temperature), own)


@pytest.mark.parametrize("top_k", [None, 3])
def test_logits_in_16_bit_are_compared_in_float32(top_k: int | None) -> None:
    half, teacher = logits(0).bfloat16(), logits(1).bfloat16()
    divergence = Divergence(beta=0.5, top_k=top_k)
    torch.testing.assert_close(divergence(half, teacher, 0.7), divergence(half.float(), teacher.float(), 0.7))


@pytest.mark.parametrize("divergence", EVERY, ids=repr)
def test_top_k_is_at_most_the_whole_and_grows_to_it(divergence: Divergence) -> None:
    own, teacher = logits(0), logits(1)
    values = [Divergence(beta=divergence.beta, top_k=k)(own, teacher, 1.0) for k in range(1, 13)]
    for fewer, more in itertools.pairwise(values):
        assert (fewer <= more + 1e-12).all()
    assert (values[0] >= 0).all()
    torch.testing.assert_close(values[-1], divergence(own, teacher, 1.0), rtol=0, atol=0)


@pytest.mark.parametrize("widths", [(12, 16), (16, 12)])
def test_the_wider_head_is_cut_to_the_tokens_that_both_have(widths: tuple[int, int]) -> None:
    own, teacher = logits(0, widths[0]).requires_grad_(), logits(1, widths[1])
    found = Divergence()(own, teacher, 1.0)
    torch.testing.assert_close(found, Divergence()(own[:, :12], teacher[:, :12], 1.0), rtol=0, atol=0)
    assert not torch.autograd.grad(found.sum(), own)[0][:, 12:].any()


@pytest.mark.parametrize(("setting", "value"), [("beta", 1.5), ("beta", -0.1), ("top_k", 0)])
def test_what_is_no_divergence_is_refused(setting: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"`divergence\.{setting}` must be .*, got {value}"):
        Divergence(**{setting: value})
