"""Causes of a run that learns nothing are found in its numbers, once, and a healthy run is left in peace."""

import re
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from tests.support.rl_runs import evenness, make_data, make_module, make_trainer
from tlt_lightning.gallery.why_nothing_is_learned import WhyNothingIsLearned, change_of, sample_of

HEALTHY = {
    "reward/mean": 0.3,
    "reward/std": 0.4,
    "reward/zero_std_groups": 0.6,
    "rollout/truncated": 0.2,
    "train/grad_norm": 1.0,
    "change": 3e-5,  # AdamW at 1e-6 on weights of 0.03
    "train/approx_kl": 0.01,
    "train/clip_fraction": 0.02,
}


def said(*iterations: dict[str, float], is_grouped: bool = True) -> list[tuple[int, str]]:
    """Number of the iteration, from 1, and what was said after it."""
    found, callback = [], WhyNothingIsLearned()
    for number, changes in enumerate(iterations, start=1):
        metrics = {**HEALTHY, **changes}
        found += [(number, cause) for cause in callback.causes(metrics, metrics.pop("change"), is_grouped)]
    return found


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"reward/zero_std_groups": 1.0}, "all responses to the same prompt earned the same"),
        ({"reward/std": 0.0, "reward/mean": 0.0}, "every reward was 0. Read completions"),
        ({"reward/std": 0.0, "reward/mean": 1.0}, "every reward was 1: it tells no two responses apart"),
        ({"reward/std": 0.0, "rollout/truncated": 1.0}, "100% of the responses were cut off at `data.sampling.max_"),
        ({"change": 1e-8}, "the policy stands still: .* by 1e-08 .* Raise the learning rate"),
        ({"change": 0.5}, "updates are far too large: .* by 50% .* Lower the learning rate"),
        ({"train/approx_kl": 2.0}, "far too large: .* by 2 nats a token"),
        ({"train/clip_fraction": 0.9}, "far too large: .* 90% of the tokens are clipped"),
    ],
)
def test_each_cause_is_said_once_after_three_iterations(changes: dict[str, float], sentence: str) -> None:
    ((number, cause),) = said(*[changes] * 8)
    assert number == 3
    assert re.search(sentence, cause)


@pytest.mark.parametrize(
    "iterations",
    [
        [{}] * 8,
        [{"reward/std": 0.0}, {"reward/std": 0.0}, {}] * 3,  # not three in a row
        [{"rollout/truncated": 1.0}] * 8,  # and yet rewards differ
        [{}, *[{"change": 0.0}] * 8],  # a schedule that ends at zero
        [{"change": 0.0, "train/grad_norm": 0.0}] * 8,  # a critic that warms up
        [{"reward/mean": mean} for mean in (0.9, 0.9, 0.9, 0.9, 0.9, 0.6, 0.6, 0.6, 0.5, 0.6, 0.6, 0.55)],
    ],
)
def test_a_run_that_learns_is_left_in_peace(iterations: list[dict[str, float]]) -> None:
    assert said(*iterations) == []


def test_a_policy_that_unlearns_is_told_of_once() -> None:
    """As in a run whose responses became ever longer until hardly one ended."""
    rewards = [0.9, 0.85, 0.95, 0.75, 0.6, 0.5, 0.45, 0.35, 0.25, 0.2, 0.1, 0.05, 0.02]
    spreads = [0.3, 0.35, 0.2, 0.43, 0.49, 0.5, 0.5, 0.48, 0.43, 0.4, 0.3, 0.2, 0.14]
    course = [{"reward/mean": mean, "reward/std": std} for mean, std in zip(rewards, spreads, strict=True)]
    ((number, cause),) = said(*course, *course[-1:] * 5)
    assert number == 13  # the means of five iterations fall below 0.81 - 0.5 in the eleventh, and stay there
    assert re.search(r"over 5 iterations has fallen from 0\.81 to 0\.12, by more than responses differ \(0\.5\)", cause)


def test_single_responses_are_no_groups() -> None:
    assert said(*[{"reward/zero_std_groups": 1.0}] * 5, is_grouped=False) == []


def test_the_change_of_weights_is_that_of_a_sample() -> None:
    torch.manual_seed(0)
    weights = torch.randn(400, 500)
    before = sample_of([weights, torch.zeros(3)])
    assert 2**15 < len(before) <= 2**16
    assert change_of(before, sample_of([1.01 * weights, torch.zeros(3)])) == pytest.approx(0.01, rel=0.02)
    assert change_of(torch.zeros(2), torch.zeros(2)) == 0.0


def constant(prompt: str, response: str, row: dict[str, Any]) -> float:
    return 0.5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reward", "rate", "expected"),
    [
        (constant, 1e-3, ["every reward was 0.5"]),
        (evenness, 1e-12, ["the policy stands still"]),
        (evenness, 1e-3, []),
    ],
)
def test_a_run_that_learns_nothing_says_why(
    reward: Any,
    rate: float,
    expected: list[str],
    policy_path: str,
    prompts_path: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    L.seed_everything(11)
    module = make_module(policy_path, optimizer=lambda p: torch.optim.SGD(p, lr=rate))
    make_trainer(tmp_path, max_epochs=4).fit(module, make_data(prompts_path, rewards=[reward]))
    warnings = [record.getMessage() for record in caplog.records if "why nothing is learned" in record.getMessage()]
    assert len(warnings) == len(expected)
    for warning, cause in zip(warnings, expected, strict=True):
        assert warning.startswith(f"Iteration 3: why nothing is learned: {cause}")
