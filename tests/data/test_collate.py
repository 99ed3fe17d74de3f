from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise

import pytest
import torch

from tlt_lightning.data.batch import Prompt, Rollout, RolloutBatch
from tlt_lightning.data.collate import collate, plan_minibatches, split_by_tokens
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


def random_lengths(seed: int, num_rows: int = 9) -> list[int]:
    """Long-tailed, longest first, with ties."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(num_rows, generator=generator).exp() * 10 + 1).long().sort(descending=True).values.tolist()


def padded(lengths: Sequence[int], parts: Sequence[range]) -> list[int]:
    return [len(part) * max(lengths[row] for row in part) for part in parts]


def every_cut(num_rows: int, num_parts: int) -> Iterator[list[range]]:
    for starts in combinations(range(1, num_rows), num_parts - 1):
        yield [range(*ends) for ends in pairwise([0, *starts, num_rows])]


@pytest.mark.parametrize("seed", range(12))
def test_no_other_cut_has_a_smaller_largest_part(seed: int) -> None:
    lengths = random_lengths(seed)
    for num_parts in range(1, len(lengths) + 1):
        parts = split_by_tokens(lengths, num_parts)
        assert [row for part in parts for row in part] == list(range(len(lengths)))
        assert len(parts) == num_parts
        assert all(parts)
        largest = max(padded(lengths, parts))
        assert largest == min(max(padded(lengths, cut)) for cut in every_cut(len(lengths), num_parts))


@pytest.mark.parametrize("num_parts", [1, 3, 8, 50, 64])
def test_the_largest_part_never_exceeds_that_of_equal_counts(num_parts: int) -> None:
    for seed in range(5):
        lengths = random_lengths(seed, num_rows=64)
        parts = split_by_tokens(lengths, num_parts)
        assert max(padded(lengths, parts)) <= -(-64 // num_parts) * lengths[0]
        assert (len(parts), sum(map(len, parts))) == (num_parts, 64)


@pytest.mark.parametrize(
    ("lengths", "sizes"),
    [
        ([100, 10, 9, 9, 9, 1], [1, 4, 1]),  # two parts would do: the third cuts where it saves most padding
        ([100, 5, 5, 5, 5, 5, 5], [1, 3, 3]),  # and in the middle where it saves none
        ([8, 8, 8, 8, 8, 8], [2, 2, 2]),
    ],
)
def test_parts_left_over_save_padding(lengths: list[int], sizes: list[int]) -> None:
    assert [len(part) for part in split_by_tokens(lengths, 3)] == sizes


@pytest.mark.parametrize("num_parts", [0, 4])
def test_a_number_of_parts_that_cannot_be_is_refused(num_parts: int) -> None:
    with pytest.raises(ValueError, match=f"`num_parts` must be 1 to 3, the number of sequences, got {num_parts}"):
        split_by_tokens([5, 4, 3], num_parts)


def test_plan_covers_every_row_once_in_equally_many_micro_batches() -> None:
    lengths = torch.tensor(random_lengths(0, num_rows=24))
    plan = plan_minibatches(lengths, micro_batch_size=4, num_steps=3, generator=torch.Generator().manual_seed(1))
    assert [len(step) for step in plan] == [2, 2, 2]
    assert [sum(map(len, step)) for step in plan] == [8, 8, 8]
    assert len({len(part) for step in plan for part in step}) > 1
    assert sorted(row for step in plan for part in step for row in part) == list(range(24))


def test_plan_puts_similar_lengths_together_largest_first() -> None:
    lengths = torch.randint(1, 100, (16,), generator=torch.Generator().manual_seed(0))
    (step,) = plan_minibatches(lengths, micro_batch_size=4, num_steps=1, generator=torch.Generator().manual_seed(1))
    sizes = [len(part) * int(lengths[part].max()) for part in step]
    assert sizes == sorted(sizes, reverse=True)
    by_length = sorted(step, key=lambda part: int(lengths[part[0]]), reverse=True)
    assert by_length != step  # so that the order by padded size is not that by length
    in_order = [lengths[row].item() for part in by_length for row in part]
    assert in_order == sorted(lengths.tolist(), reverse=True)


def test_plan_differs_between_passes_and_repeats_with_its_seed() -> None:
    lengths = torch.ones(16, dtype=torch.long)

    def plans(seed: int) -> list[list[list[list[int]]]]:
        generator = torch.Generator().manual_seed(seed)
        return [plan_minibatches(lengths, micro_batch_size=4, num_steps=2, generator=generator) for _ in range(2)]

    first, second = plans(0)
    assert first != second
    assert plans(0) == [first, second]
