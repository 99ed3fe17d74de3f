from itertools import combinations
from math import exp
from typing import Any

import pytest
import torch

from tlt_lightning.metrics.held_out import HeldOutMetrics, pass_at_k
from tlt_lightning.rollout import Prompt, Response, Rollout


@pytest.mark.parametrize(("num_samples", "num_correct", "k"), [(4, 1, 2), (5, 3, 2), (6, 0, 3), (4, 4, 4)])
def test_pass_at_k_is_the_share_of_subsets_with_a_correct_sample(num_samples: int, num_correct: int, k: int) -> None:
    samples = [i < num_correct for i in range(num_samples)]
    subsets = list(combinations(samples, k))
    assert pass_at_k(num_samples, num_correct, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def rollout(group: int, exact: float, brevity: float = 0.0, length: int = 1) -> Rollout:
    told = ((0, 3),)  # by an environment, and no part of the length
    response = Response(0, [2] * (3 + length), [-1.0] * (3 + length), "stop", (0,), observed=told)
    rewards = {"exact": exact, "brevity": brevity}
    return Rollout(Prompt("q", [2]), response, "text", group, rewards, exact + brevity)


def alone(own: Any) -> list[Any]:
    return [own]


def test_pass_at_k_averages_over_prompts_up_to_the_smallest_group() -> None:
    metrics = HeldOutMetrics()
    metrics.add([rollout(0, 1.0), rollout(0, 0.0), rollout(0, 0.0), rollout(0, 0.0)])
    metrics.add([rollout(1, 1.0) for _ in range(4)])
    values = metrics.read("val", lambda own: [own, own])  # by two ranks
    expected = {"val/accuracy": 0.625, "val/pass@2": 0.75, "val/pass@4": 1.0, "val/reward": 0.625, "val/length": 1.0}
    assert values == pytest.approx(expected)
    smaller = HeldOutMetrics()
    smaller.add([*(rollout(0, float(number == 0)) for number in range(4)), rollout(1, 1.0), rollout(1, 0.0)])
    values = smaller.read("val", alone)
    assert (values["val/accuracy"], values["val/pass@2"]) == pytest.approx((0.375, 0.75))
    assert "val/pass@4" not in values


def test_held_out_answers_are_measured_under_their_stage_and_anew_each_time() -> None:
    metrics = HeldOutMetrics()
    metrics.add([rollout(0, 1.0, 0.5, 2), rollout(0, 0.0, 0.5, 4), rollout(1, 0.0, 0.75, 6), rollout(1, 0.0, 0.25, 8)])
    metrics.add([rollout(2, 1.0, 0.5, 9), rollout(2, 1.0, 0.5, 1)])
    first = {"accuracy": 0.5, "pass@2": 2 / 3, "reward": 1.0, "length": 5.0}
    assert metrics.read("val", alone) == pytest.approx({f"val/{name}": value for name, value in first.items()})
    metrics.add([rollout(0, 0.0, 0.25, 7)])
    assert metrics.read("test", alone) == {"test/accuracy": 0.0, "test/reward": 0.25, "test/length": 7.0}
    assert metrics.read("test", alone) == {}


def test_a_loss_is_the_mean_over_the_tokens_of_all_ranks() -> None:
    metrics = HeldOutMetrics(has_rewards=False)
    metrics.add_losses(torch.tensor([1.0, 3.0]))
    metrics.add_losses(torch.tensor([2.0]))
    values = metrics.read("val", lambda own: [own, ([], 9.0, 2), ([], 0.0, 0)])
    assert values == pytest.approx({"val/loss": 3.0, "val/perplexity": exp(3.0)})
