from itertools import combinations
from math import isnan

import pytest
import torch

from tlt_lightning.metrics.held_out import HeldOutMetrics, PassAtK, pass_at_k
from tlt_lightning.rollout import Prompt, Response, Rollout


@pytest.mark.parametrize(("num_samples", "num_correct", "k"), [(4, 1, 2), (5, 3, 2), (6, 0, 3), (4, 4, 4)])
def test_pass_at_k_is_the_share_of_subsets_with_a_correct_sample(num_samples: int, num_correct: int, k: int) -> None:
    samples = [i < num_correct for i in range(num_samples)]
    subsets = list(combinations(samples, k))
    assert pass_at_k(num_samples, num_correct, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_metric_averages_over_prompts_and_batches() -> None:
    metric = PassAtK()
    metric.update([(0, True), (0, False), (0, False), (0, False)])
    metric.update([(1, True), (1, True), (1, True), (1, True)])
    values = {name: float(value) for name, value in metric.compute().items()}
    assert values == pytest.approx({"accuracy": 0.625, "pass@2": 0.75, "pass@4": 1.0})
    metric.update([(0, True), (0, False)])  # the smallest group
    values = {name: float(value) for name, value in metric.compute().items()}
    assert values == pytest.approx({"accuracy": 1.75 / 3, "pass@2": 2.5 / 3})


def test_held_out_answers_are_measured_under_their_stage_and_anew_each_time() -> None:
    def rollout(group: int, exact: float, brevity: float, length: int) -> Rollout:
        told = ((0, 3),)  # by an environment, and no part of the length
        response = Response(0, [2] * (3 + length), [-1.0] * (3 + length), "stop", (0,), observed=told)
        rewards = {"exact": exact, "brevity": brevity}
        return Rollout(Prompt("q", [2]), response, "text", group, rewards, exact + brevity)

    metrics = HeldOutMetrics()
    metrics.add([rollout(0, 1.0, 0.5, 2), rollout(0, 0.0, 0.5, 4), rollout(1, 0.0, 0.75, 6), rollout(1, 0.0, 0.25, 8)])
    metrics.add([rollout(2, 1.0, 0.5, 9), rollout(2, 1.0, 0.5, 1)])
    first = {"accuracy": 0.5, "pass@2": 2 / 3, "reward": 1.0, "length": 5.0}
    assert metrics.read("val") == pytest.approx({f"val/{name}": value for name, value in first.items()})
    metrics.add([rollout(0, 0.0, 0.25, 7)])
    assert metrics.read("test") == {"test/accuracy": 0.0, "test/reward": 0.25, "test/length": 7.0}


def test_a_process_alone_gathers_from_nobody_whatever_group_its_engine_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's group on a GPU has no backend for tensors on the CPU."""

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("No backend type associated with device type cpu")

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda *_: 1)
    monkeypatch.setattr(torch.distributed, "all_gather", fail)
    monkeypatch.setattr(torch.distributed, "barrier", fail)
    metrics = HeldOutMetrics(has_rewards=False)
    metrics.add_losses(torch.tensor([1.0, 3.0]))
    assert metrics.read("val")["val/loss"] == 2.0


def test_a_loss_that_is_no_number_is_shown() -> None:
    metrics = HeldOutMetrics(has_rewards=False)
    metrics.add_losses(torch.tensor([1.0, torch.nan]))
    metrics.add_losses(torch.tensor([3.0]))
    assert isnan(metrics.read("val")["val/loss"])
