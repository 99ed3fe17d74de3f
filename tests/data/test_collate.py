import pytest
import torch

from tlt_lightning.data.batch import Prompt, Rollout, RolloutBatch
from tlt_lightning.data.collate import collate, plan_minibatches
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
    assert part.input_ids.tolist() == [[2, 3, 10, 0, 0], [2, 3, 4, 10, 11]]
    assert part.response_mask.tolist() == [[1, 0], [1, 1]]
    assert part.advantages is not None
    assert part.advantages.tolist() == [[10, 11], [0, 1]]
    assert part.temperature == 0.7
    assert len(part) == 2


def test_plan_covers_every_row_once_with_equal_sizes() -> None:
    lengths = torch.randint(1, 100, (24,), generator=torch.Generator().manual_seed(0))
    plan = plan_minibatches(lengths, micro_batch_size=4, num_steps=3, generator=torch.Generator().manual_seed(1))
    assert [len(step) for step in plan] == [2, 2, 2]
    assert sorted(row for step in plan for part in step for row in part) == list(range(24))


def test_plan_puts_similar_lengths_together_longest_first() -> None:
    lengths = torch.randint(1, 100, (16,), generator=torch.Generator().manual_seed(0))
    (step,) = plan_minibatches(lengths, micro_batch_size=4, num_steps=1, generator=torch.Generator().manual_seed(1))
    in_order = [lengths[row].item() for part in step for row in part]
    assert in_order == sorted(lengths.tolist(), reverse=True)


def test_plan_differs_between_passes_and_repeats_with_its_seed() -> None:
    lengths = torch.ones(16)

    def plans(seed: int) -> list[list[list[list[int]]]]:
        generator = torch.Generator().manual_seed(seed)
        return [plan_minibatches(lengths, micro_batch_size=4, num_steps=2, generator=generator) for _ in range(2)]

    first, second = plans(0)
    assert first != second
    assert plans(0) == [first, second]
