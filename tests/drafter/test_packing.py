import random

import pytest
import torch

from tests.support.drafters.draft_texts import pack, random_sequence
from tlt_lightning.drafter.packing import PADDING, PackedBatch, check_num_tokens, plan_packs


def spans(lengths: list[int], num_tokens: int) -> dict[int, list[tuple[int, int]]]:
    """Pieces of each sequence in ascending order."""
    found: dict[int, list[tuple[int, int]]] = {}
    for plan in plan_packs(lengths, num_tokens):
        for piece in plan:
            found.setdefault(piece.sequence, []).append((piece.start, piece.stop))
    return {sequence: sorted(pieces) for sequence, pieces in found.items()}


@pytest.mark.parametrize("seed", range(20))
def test_every_entry_is_packed_once_and_packs_are_full(seed: int) -> None:
    draw = random.Random(seed)
    lengths = [int(draw.lognormvariate(4, 1.2)) + 1 for _ in range(60)]
    for sequence, pieces in spans(lengths, 256).items():
        edges = [edge for piece in pieces for edge in piece]
        assert edges[0] == 0
        assert edges[-1] == lengths[sequence] - 2
        assert edges[1:-1:2] == edges[2:-1:2]
    sizes = [sum(piece.stop - piece.start for piece in plan) for plan in plan_packs(lengths, 256)]
    assert max(sizes) <= 256
    assert all(size >= 256 - 256 // 32 for size in sizes[:-1])


def test_sequences_that_fit_are_cut_only_to_fill_a_gap() -> None:
    assert spans([102, 102, 52], 256) == {0: [(0, 100)], 1: [(0, 100)], 2: [(0, 50)]}
    assert spans([202, 202], 256) == {0: [(0, 144), (144, 200)], 1: [(0, 200)]}
    assert spans([250, 202], 256) == {0: [(0, 248)], 1: [(0, 200)]}  # a gap of 8 is not worth a cut
    assert plan_packs([250, 9], 256) == [[(0, 0, 248), (1, 0, 7)]]  # what fits into it whole is
    assert spans([249, 202], 256) == {0: [(0, 247)], 1: [(0, 191), (191, 200)]}


def test_sequences_without_entries_are_left_out() -> None:
    assert plan_packs([1, 2, 3], 128) == [[(2, 0, 1)]]
    assert pack([random_sequence(2, 1)], 128) == []


def entry(batch: PackedBatch, document: int, position: int) -> dict[str, torch.Tensor]:
    (index,) = ((batch.document_ids[0] == document) & (batch.position_ids[0] == position)).nonzero().flatten()
    names = ("input_ids", "next_ids", "states", "last_states", "loss_mask")
    return {name: getattr(batch, name)[0, index] for name in names}


def test_an_entry_holds_what_the_head_reads_and_what_it_should_draft() -> None:
    sequences = [random_sequence(60, prompt_length=5), random_sequence(40, prompt_length=30)]
    (batch,) = pack(sequences, 128)
    assert batch.lengths == (58, 38)
    for document, sequence in enumerate(sequences):
        for i in range(len(sequence) - 2):
            here = entry(batch, document, i)
            assert here["input_ids"] == sequence.input_ids[i + 1]
            assert here["next_ids"] == sequence.input_ids[i + 2]
            assert torch.equal(here["states"], sequence.states[i])
            assert torch.equal(here["last_states"], sequence.last_states[i + 1])
            assert here["loss_mask"] == (i + 1 >= sequence.prompt_length)
    padding = batch.document_ids[0] == PADDING
    assert PADDING == -1  # as `PackedBatch` says
    assert padding.sum() == 128 - 58 - 38
    assert not batch.loss_mask[0, padding].any()


def test_pieces_of_a_long_sequence_keep_their_positions() -> None:
    sequence = random_sequence(300, prompt_length=290)
    batches = pack([sequence], 128)
    assert [batch.input_ids.shape for batch in batches] == [(1, 128)] * 3
    found = {}
    for batch in batches:
        for index in (batch.document_ids[0] != PADDING).nonzero().flatten().tolist():
            found[int(batch.position_ids[0, index])] = int(batch.next_ids[0, index])
    assert found == {i: int(sequence.input_ids[i + 2]) for i in range(298)}
    assert sum(int(batch.loss_mask.sum()) for batch in batches) == 298 - 289


@pytest.mark.parametrize("num_tokens", [0, 100, 200])
def test_pack_lengths_that_are_no_multiple_of_128_are_refused(num_tokens: int) -> None:
    with pytest.raises(ValueError, match=r"`num_tokens`.*128"):
        check_num_tokens(num_tokens)
