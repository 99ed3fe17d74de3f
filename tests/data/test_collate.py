import pytest
import torch

from tlt_lightning.data.batch import Prompt, Rollout, RolloutBatch
from tlt_lightning.data.collate import collate
from tlt_lightning.engine import Response


def rollout(prompt_length: int, length: int, group: int = 0, version: int = 3) -> Rollout:
    response = Response(0, list(range(10, 10 + length)), [-0.5] * length, "length", (version, version + 1))
    prompt = Prompt("q", list(range(2, 2 + prompt_length)))
    return Rollout(prompt, response, "text", group, {"score": 1.0}, 0.25)


@pytest.fixture
def batch() -> RolloutBatch:
    return collate([rollout(3, 2), rollout(1, 5, group=1), rollout(2, 1)], pad_id=0, temperature=0.7)


def test_sequences_are_padded_on_the_right(batch: RolloutBatch) -> None:
    assert batch.input_ids.tolist() == [[2, 3, 4, 10, 11, 0], [2, 10, 11, 12, 13, 14], [2, 3, 10, 0, 0, 0]]
    assert batch.response_mask.tolist() == [[1, 1, 0, 0, 0], [1, 1, 1, 1, 1], [1, 0, 0, 0, 0]]
    assert batch.response_lengths.tolist() == [2, 5, 1]
    assert batch.rollout_logps[0].tolist() == [-0.5, -0.5, 0, 0, 0]
    assert batch.policy_versions.tolist() == [3, 3, 3]
    assert batch.groups.tolist() == [0, 1, 0]
    assert batch.response_mask.dtype == batch.rollout_logps.dtype == batch.rewards.dtype == torch.float32


def test_selected_rows_are_trimmed_to_their_own_length(batch: RolloutBatch) -> None:
    batch.advantages = torch.arange(15.0).view(3, 5)
    part = batch.select([2, 0])
    assert (batch.rows, part.rows) == ((), (2, 0))
    assert part.input_ids.tolist() == [[2, 3, 10, 0, 0], [2, 3, 4, 10, 11]]
    assert part.response_mask.tolist() == [[1, 0], [1, 1]]
    assert part.advantages is not None
    assert part.advantages.tolist() == [[10, 11], [0, 1]]
    assert part.temperature == 0.7
    assert len(part) == 2
