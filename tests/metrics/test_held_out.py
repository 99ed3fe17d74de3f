from itertools import combinations

import pytest

from tlt_lightning.metrics.held_out import PassAtK, pass_at_k


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
