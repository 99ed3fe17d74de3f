import pytest
import torch

from tests.test_policy import make_batch
from tlt_lightning.long_tail.policy_drift import PolicyDrift
from tlt_lightning.rollout import RolloutBatch


def test_the_drift_is_the_kl_on_the_first_answers_and_survives_a_checkpoint() -> None:
    first, later = make_batch([3, 5, 4], [6, 1, 9]), make_batch([2, 2], [3, 3])
    moved_by = torch.tensor(0.0)

    def score(batch: RolloutBatch) -> torch.Tensor:
        return (batch.input_ids[:, : batch.response_mask.shape[1]] / -10 - moved_by) * batch.response_mask

    drift = PolicyDrift()
    assert drift.measure(first, score) == 0
    moved_by.fill_(0.5)
    expected = pytest.approx((moved_by.neg().exp() - 1 + moved_by).item())
    assert drift.measure(later, score) == expected
    resumed = PolicyDrift()
    resumed.load_state_dict(drift.state_dict())
    assert resumed.measure(later, score) == expected
    assert PolicyDrift().measure(later, score) == 0


def test_many_short_answers_are_scored_in_few_passes() -> None:
    lengths = list(range(2, 22))
    passes: list[list[int]] = []

    def score(batch: RolloutBatch) -> torch.Tensor:
        passes.append(batch.response_lengths.tolist())
        return torch.zeros_like(batch.response_mask)

    PolicyDrift().measure(make_batch([3] * 20, lengths), score)
    assert len(passes) == 1
    assert sorted(length for each in passes for length in each) == lengths


def test_a_batch_of_long_answers_gives_its_shortest() -> None:
    lengths: list[int] = []

    def score(batch: RolloutBatch) -> torch.Tensor:
        lengths.append(int(batch.response_lengths))
        return torch.zeros_like(batch.response_mask)

    PolicyDrift().measure(make_batch([4, 4], [3000, 2500]), score)
    assert set(lengths) == {2500}
