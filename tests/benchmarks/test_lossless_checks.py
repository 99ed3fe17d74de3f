"""The checks of losslessness find what they are there to find."""

import pytest
import torch
from torch import Tensor

from benchmarks.lossless.checks import agreement, divergence, excess, first_difference, gaps, score
from tlt_lightning.policy import load_policy

PROMPTS = [[12, 13, 3], [14, 15, 3, 4]] * 32


def sample(model: torch.nn.Module, temperature: float, num: int = 12) -> list[tuple[list[int], list[float]]]:
    """Texts drawn at a temperature, with the log-probs of temperature 1."""
    written = []
    generator = torch.Generator().manual_seed(0)
    for prompts in (PROMPTS[::2], PROMPTS[1::2]):
        ids, logps = torch.tensor(prompts), []
        for _ in range(num):
            with torch.no_grad():
                logits = model(input_ids=ids).logits[:, -1].float()
            drawn = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
            logps.append(logits.log_softmax(-1).gather(-1, drawn))
            ids = torch.cat([ids, drawn], -1)
        texts: Tensor = ids[:, -num:]
        written.append(list(zip(texts.tolist(), torch.cat(logps, -1).tolist(), strict=True)))
    return [text for pair in zip(*written, strict=True) for text in pair]


@pytest.fixture(scope="module")
def model(policy_path: str) -> torch.nn.Module:
    return load_policy(policy_path).eval()


def test_texts_part_at_their_first_difference() -> None:
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 5, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2


def test_divergence_counts_tokens_up_to_where_texts_part() -> None:
    one = [([1, 2, 3, 4], [0.0] * 4), ([5, 6], [0.0] * 2)]
    other = [([1, 9, 3, 4], [0.0] * 4), ([5, 6], [0.0] * 2)]
    found = divergence(one, other)
    assert (found["parted"], found["texts"], found["first"]) == (1, 2, 1)
    assert found["compared_tokens"] == 2 + 2
    assert divergence(one, one)["parted"] == 0
    assert excess(found, divergence(one, one)) > 1
    assert excess(found, found) == 0


def test_exact_samples_agree_with_the_trainer(model: torch.nn.Module) -> None:
    engine, trainer, entropy = score(model, PROMPTS, sample(model, 1.0))
    assert len(engine) == 64 * 12
    found = agreement(engine, trainer, entropy)
    assert found["k3"] < 1e-9
    assert found["importance"] == pytest.approx(1, abs=1e-4)
    assert abs(found["surprise_z"]) < 3


def test_samples_from_another_distribution_are_found(model: torch.nn.Module) -> None:
    cold = agreement(*score(model, PROMPTS, sample(model, 0.6)))
    assert cold["k3"] < 1e-9  # their log-probs are right
    assert cold["surprise_z"] < -5


def test_wrong_log_probs_are_found(model: torch.nn.Module) -> None:
    engine, trainer, entropy = score(model, PROMPTS, sample(model, 1.0))
    noise = 0.1 * torch.randn(engine.shape, generator=torch.Generator().manual_seed(0))
    assert agreement(engine + noise, trainer, entropy)["k3"] == pytest.approx(0.005, rel=0.2)


def test_gaps_are_what_lies_between_the_two_tokens(model: torch.nn.Module) -> None:
    prompt = PROMPTS[0]
    with torch.no_grad():
        logps = model(input_ids=torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
    one, other = [([7, 8], [0.0, 0.0])], [([9, 8], [0.0, 0.0])]
    assert gaps(model, [prompt], one, other) == pytest.approx([abs(float(logps[7] - logps[9]))], abs=1e-4)
    assert gaps(model, [prompt], one, one) == []
