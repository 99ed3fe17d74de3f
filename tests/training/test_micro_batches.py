from itertools import product

import pytest
import torch

from tlt_lightning.training.micro_batches import balance, cut_alike, cut_micro_batches, end_step, fill_padded


def random_lengths(seed: int, num_rows: int) -> list[int]:
    """Long-tailed, longest first, with ties."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(num_rows, generator=generator).exp() * 10 + 1).long().sort(descending=True).values.tolist()


def sizes(lengths: list[int], parts: list[list[int]]) -> list[int]:
    return [sum(lengths[place] for place in part) for part in parts]


@pytest.mark.parametrize("seed", range(8))
def test_the_largest_part_is_close_to_the_smallest_possible(seed: int) -> None:
    lengths = random_lengths(seed, 5)
    for max_tokens in (max(lengths), max(lengths[0], sum(lengths) // 2 + 1), sum(lengths)):
        parts = balance(lengths, max_tokens)
        assert sorted(place for part in parts for place in part) == list(range(5))
        assert all(parts)
        assert sizes(lengths, parts) == sorted(sizes(lengths, parts), reverse=True)
        assert sizes(lengths, parts)[0] <= max_tokens
        best = min(
            max(sum(length for length, own in zip(lengths, owners, strict=True) if own == part) for part in owners)
            for owners in product(range(len(parts)), repeat=5)
        )
        assert sizes(lengths, parts)[0] <= 4 / 3 * best


def test_parts_are_as_few_as_tokens_allow_where_sequences_are_short() -> None:
    lengths = random_lengths(0, 500)
    for max_tokens in (1000, 3000):
        parts = balance(lengths, max_tokens)
        assert len(parts) == -(-sum(lengths) // max_tokens)
        assert max(sizes(lengths, parts)) - min(sizes(lengths, parts)) <= lengths[-1] + 1


@pytest.mark.parametrize("max_tokens", [100, 150, 1000])
def test_padding_counts_where_a_pass_has_it(max_tokens: int) -> None:
    lengths = [min(length, 100) for length in random_lengths(3, 64)]
    parts = fill_padded(lengths, max_tokens)
    padded = [len(part) * max(lengths[place] for place in part) for part in parts]
    assert max(padded) <= max_tokens
    assert padded == sorted(padded, reverse=True)
    assert sorted(place for part in parts for place in part) == list(range(64))


def test_micro_batches_name_rows_and_refuse_what_fits_into_none() -> None:
    lengths, rows = torch.tensor([4, 9, 2, 7, 5]), torch.tensor([4, 1, 0, 2])
    assert cut_micro_batches(rows, lengths, 11) == [[1, 2], [4, 0]]
    assert cut_micro_batches(rows, lengths, 10, is_padded=True) == [[4, 0], [1], [2]]
    assert cut_micro_batches(rows[:0], lengths, 11) == []
    assert cut_micro_batches(rows, lengths, 9) == [[1], [0, 2], [4]]
    assert cut_alike([rows], lengths, 10, is_padded=True, largest_counts=None) == [[[4, 0], [1], [2]]]
    with pytest.raises(ValueError, match="has 9 tokens, more than `micro_batch_tokens` 8"):
        cut_micro_batches(rows, lengths, 8)


@pytest.mark.parametrize("is_padded", [False, True])
def test_ranks_cut_each_step_into_equally_many_parts(is_padded: bool) -> None:
    """Ranks of 12 sequences that would cut into different numbers agree, whoever needs more in the end."""
    ranks = [torch.tensor(random_lengths(seed, 12)).clamp(max=100) for seed in range(6)]
    steps = list(torch.arange(12).chunk(2))
    counts = [torch.ones(2, dtype=torch.int64)]  # what ranks know of the others so far

    def cut(lengths: torch.Tensor) -> list[list[list[int]]]:
        rounds = iter(counts[1:])
        return cut_alike(steps, lengths, 100, is_padded=is_padded, largest_counts=lambda own: next(rounds, own))

    while True:
        plans = [cut(lengths) for lengths in ranks]
        most = torch.tensor([[len(step) for step in plan] for plan in plans]).max(0).values
        if torch.equal(most, counts[-1]):
            break
        counts.append(most)
    alone = [[len(cut_micro_batches(rows, lengths, 100, is_padded=is_padded)) for rows in steps] for lengths in ranks]
    assert len({tuple(each) for each in alone}) > 1
    for plan, lengths in zip(plans, ranks, strict=True):
        assert [len(step) for step in plan] == most.tolist()
        for step, rows in zip(plan, steps, strict=True):
            assert sorted(row for part in step for row in part) == rows.tolist()
            assert all(step)
            assert all(int(lengths[part].sum()) <= 100 for part in step)


def test_metrics_of_a_step_are_sums_over_its_micro_batches() -> None:
    one, three = torch.tensor(1.0), torch.tensor(3.0)
    parts = [{"a": one}, {"a": three, "b": three}]
    assert end_step(parts) == {"a": 4.0, "b": 3.0}
    assert parts == []  # the next step's are its own
    assert end_step([{"a_max": one}, {"a_max": three}, {}]) == {"a_max": 3.0}
