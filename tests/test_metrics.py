from itertools import combinations

import pytest
import torch

from tlt_lightning.data.batch import Prompt, Rollout
from tlt_lightning.engine import Response
from tlt_lightning.metrics import PassAtK, combine_ranks, pass_at_k, rollout_metrics, tail_share


def rollout(group: int, reward: float, length: int = 3, reason: str = "stop") -> Rollout:
    response = Response(0, [2] * length, [-1.0] * length, reason, (0,))
    return Rollout(Prompt("q", [2]), response, "text", group, {"score": reward}, reward)


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


def test_rollout_metrics_count_what_they_say() -> None:
    rollouts = [rollout(0, 1.0, 10), rollout(0, 1.0, 20), rollout(1, 0.0, 30, "length"), rollout(1, 1.0, 40)]
    metrics = rollout_metrics(rollouts)
    assert metrics["rollout/length_max"] == 40
    assert metrics["rollout/length_p50"] == 25
    assert metrics["rollout/truncated"] == 0.25
    assert metrics["reward/mean"] == metrics["reward/score"] == 0.75
    assert metrics["reward/std"] == pytest.approx(torch.tensor([1.0, 1, 0, 1]).std(correction=0).item())
    assert metrics["reward/zero_std_groups"] == 0.5


def test_tail_share_is_the_time_with_few_unfinished() -> None:
    trace = [(1.0, 20), (2.0, 10), (4.0, 2), (10.0, 0)]
    assert tail_share(trace, 20) == pytest.approx(0.6)
    assert tail_share([], 20) == 0.0


def test_ranks_are_combined_as_the_names_say_even_where_one_lacks_a_metric() -> None:
    first = {
        "reward/mean": 1.0,
        "rollout/length_max": 9.0,
        "reward/a_errors": 1.0,
        "rollout/groups_drawn": 4.0,
        "speculation/acceptance_rate_pos_3": 0.5,
    }
    second = {"reward/mean": 2.0, "rollout/length_max": 7.0, "reward/a_errors": 2.0, "rollout/groups_drawn": 2.0}
    assert combine_ranks([first, second]) == {
        "reward/mean": 1.5,
        "rollout/length_max": 9.0,
        "reward/a_errors": 3.0,
        "rollout/groups_drawn": 6.0,
        "speculation/acceptance_rate_pos_3": 0.5,
    }
