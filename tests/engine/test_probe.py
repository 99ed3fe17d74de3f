import logging
from math import log

import pytest
import torch

from tlt_lightning.engine.probe import TOLERANCES, check_same_logps, warn_of_mismatch, warn_of_surprise

SAMPLED = torch.tensor([[-1.0, -2.0], [-3.0, 0.0]])
MASK = torch.tensor([[1.0, 1.0], [1.0, 0.0]])


def padded(shift: float) -> torch.Tensor:
    return torch.tensor([[-1.0, -2.0], [-3.0, -99.0]]) + shift


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "fp8"])
def test_log_probs_within_the_tolerance_of_their_type_pass(dtype: str) -> None:
    shift = 0.9 * TOLERANCES[dtype]
    assert check_same_logps(SAMPLED, padded(shift), MASK, dtype=dtype, when="") == pytest.approx(shift, rel=1e-2)


@pytest.mark.parametrize(
    ("dtype", "shift"), [("float32", 0.02), ("bfloat16", 0.2), ("fp8", 0.5), ("float32", float("nan"))]
)
def test_others_end_the_run_with_both_numbers_and_the_way_out(dtype: str, shift: float) -> None:
    with pytest.raises(RuntimeError, match=rf"After it .*3 tokens differ by .* in {dtype}.*TransformersEngine"):
        check_same_logps(SAMPLED, padded(shift), MASK, dtype=dtype, when="After it")


def test_in_8_bit_the_message_says_how_to_tell_too_few_bits_from_a_fault() -> None:
    for dtype, is_told in {"bfloat16": False, "fp8": True}.items():
        with pytest.raises(RuntimeError) as caught:
            check_same_logps(SAMPLED, padded(9.0), MASK, dtype=dtype, when="")
        for remedy in ("`python -m benchmarks mismatch`", "`quantization.layers_in_16_bit`", "`quantization: null`"):
            assert (remedy in str(caught.value)) == is_told


def test_a_large_kl_is_a_warning_in_every_iteration(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        warn_of_mismatch(0.005, 1)
        warn_of_mismatch(0.05, 1, "fp8")
        assert not caplog.records
        warn_of_mismatch(0.3, 2)
        warn_of_mismatch(0.3, 3)
    assert [record.getMessage()[:12] for record in caplog.records] == ["Iteration 2:", "Iteration 3:"]
    assert "TransformersEngine" in caplog.text


def surprise_of(seed: int, *, moved: float = 0.0, replaced: float = 0.0, num_tokens: int = 2000) -> dict[str, float]:
    """Metrics of tokens whose policy has `moved` since, a share of them `replaced` by the least likely token."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(num_tokens, 8, generator=generator, dtype=torch.float64)
    logps = logits.log_softmax(-1)
    theirs = (logits + moved * torch.randn(num_tokens, 8, generator=generator, dtype=torch.float64)).log_softmax(-1)
    tokens = torch.multinomial(theirs.exp(), 1, generator=generator)
    is_replaced = torch.rand(num_tokens, 1, generator=generator) < replaced
    tokens = torch.where(is_replaced, logits.argmin(-1, keepdim=True), tokens)
    surprise = -logps.gather(-1, tokens)[:, 0] + (logps.exp() * logps).sum(-1)
    difference = (logps - theirs).gather(-1, tokens)
    return {
        "mismatch/surprise": surprise.mean().item(),
        "mismatch/surprise_square": surprise.square().mean().item(),
        "mismatch/kl": (difference.exp() - 1 - difference).mean().item(),
        "rollout/tokens": num_tokens,
    }


@pytest.mark.parametrize("moved", [0.0, 0.01, 0.1, 0.5, 1.0])
def test_tokens_of_the_policy_or_one_beside_it_are_no_surprise(moved: float, caplog: pytest.LogCaptureFixture) -> None:
    for seed in range(20):
        metrics = surprise_of(seed, moved=moved)
        warn_of_surprise(metrics, 1)
        assert "mismatch/surprise_square" not in metrics
    assert not caplog.records


@pytest.mark.parametrize("num_tokens", [32, 800, 20_000])
@pytest.mark.parametrize("rare", [1e-4, 2e-3])
def test_a_policy_that_is_sure_of_its_tokens_is_no_surprise(
    rare: float, num_tokens: int, caplog: pytest.LogCaptureFixture
) -> None:
    sure, unlikely = -log(1 - rare), -log(rare / 1000)  # one of a thousand tokens
    entropy = (1 - rare) * sure + rare * unlikely
    for seed in range(50):
        drawn = int(torch.poisson(torch.tensor(rare * num_tokens), torch.Generator().manual_seed(seed)))
        surprise = torch.tensor([unlikely] * drawn + [sure] * (num_tokens - drawn)) - entropy
        found = {
            "mismatch/surprise": surprise.mean().item(),
            "mismatch/surprise_square": surprise.square().mean().item(),
        }
        warn_of_surprise({**found, "rollout/tokens": num_tokens}, 1)
    assert not caplog.records


@pytest.mark.parametrize("moved", [0.0, 0.1])
def test_tokens_that_nobody_drew_are_loud(moved: float, caplog: pytest.LogCaptureFixture) -> None:
    for seed in range(20):
        warn_of_surprise(surprise_of(seed, moved=moved, replaced=0.2), 3)
    assert len(caplog.records) == 20
    assert "Iteration 3: `mismatch/surprise` is " in caplog.text
    assert "Leave `engine.speculation` out" in caplog.text
