"""Texts lie end to end, and the target reads each of them once."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import AutoModel

from tests.conftest import save_policy
from tlt_lightning.data.formats import Text
from tlt_lightning.drafter.packing import PackedBatch, Piece, num_entries
from tlt_lightning.drafter.texts.states import StateReader, similar_lengths
from tlt_lightning.drafter.texts.stream import PackStream, cut_stream

PACK = 128


def texts_of(lengths: Sequence[int], vocab_size: int = 32) -> list[Text]:
    draw = random.Random(0)
    return [Text([draw.randrange(2, vocab_size) for _ in range(length)], 4) for length in lengths]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = save_policy(tmp_path_factory.mktemp("policy"), max_position_embeddings=1024)
    return AutoModel.from_pretrained(path).requires_grad_(False)


def stream(target: Any, texts: Any, rank: int = 0, num_ranks: int = 1, seed: str | None = None) -> PackStream:
    reader = StateReader(target, (0, 1, 2), PACK)
    return PackStream(texts, reader, PACK, rank, num_ranks, None if seed is None else lambda: (seed, 0))


def entries_of(packs: Sequence[PackedBatch]) -> list[tuple[int, int, int]]:
    """Position, token and next token of every entry, in their order."""
    found = []
    for pack in packs:
        is_entry = pack.document_ids[0] >= 0
        rows = (pack.position_ids[0, is_entry], pack.input_ids[0, is_entry], pack.next_ids[0, is_entry])
        found += list(zip(*(row.tolist() for row in rows), strict=True))
    return found


def test_the_target_reads_each_text_once_however_many_packs_it_fills(target: Any) -> None:
    texts = texts_of([600, 5, 90, 700, 30, 2, 60, 128, 131, 90])
    read = []
    handle = target.register_forward_pre_hook(
        lambda module, args, kwargs: read.append(int(kwargs["input_ids"].count_nonzero())), with_kwargs=True
    )
    for seed in (None, "0", "1"):
        read.clear()
        packs = list(stream(target, texts, seed=seed))
        num_tokens = sum(len(text.ids) for text in texts) - 2  # the text of two tokens has nothing to learn
        assert sum(read) == num_tokens
        assert sorted(entries_of(packs)) == sorted(
            (place, text.ids[place + 1], text.ids[place + 2])
            for text in texts
            for place in range(num_entries(len(text.ids)))
        )
        assert all((pack.document_ids >= 0).all() for pack in packs[:-1])  # nothing is padded
    handle.remove()


def test_pieces_of_a_text_have_all_that_is_before_them(target: Any) -> None:
    texts = texts_of([40, 500])
    packs = list(stream(target, texts))
    for number, pack in enumerate(packs[1:], start=1):
        start = int(pack.position_ids[0, 0])
        assert start == number * PACK - 38
        (context, *_) = pack.contexts
        assert context is not None
        assert context.input_ids.tolist() == texts[1].ids[1 : start + 1]
    last = packs[-1]
    (expected,) = StateReader(target, (0, 1, 2), PACK).read([texts[1]])
    end = last.lengths[0]
    assert torch.equal(last.states[0, :end], expected.states[-end - 2 : -2])


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ranks_share_a_stream_in_equal_parts(num_ranks: int, target: Any) -> None:
    texts = texts_of([300, 5, 90, 200, 30, 60, 128, 131, 90])
    alone = [pack.input_ids.tolist() for pack in stream(target, texts, seed="0")]
    ranks = [stream(target, texts, rank, num_ranks, "0") for rank in range(num_ranks)]
    assert {len(rank) for rank in ranks} == {len(alone) // num_ranks}
    dealt = [pack.input_ids.tolist() for rank in ranks for pack in rank]
    assert dealt == alone[: len(dealt)]
    for seed, use in ((None, "hold out"), ("0", "learn from")):
        message = rf"`completions` to {use} fill 1 packs of `num_tokens` 128, fewer .* ranks \(2\).*`val_share`"
        with pytest.raises(ValueError, match=message):
            stream(target, texts_of([60, 60]), 0, 2, seed)


def test_a_stream_is_cut_as_it_is_asked_for() -> None:
    plans = cut_stream([5, 2, 9, 1000], [2, 0, 1, 3], 6, 0, 100)
    assert next(plans) == [Piece(2, 0, 6)]
    assert next(plans) == [Piece(2, 6, 7), Piece(0, 0, 3), Piece(3, 0, 2)]
    assert list(cut_stream([5, 2, 9, 1000], [2, 0, 1, 3], 6, 1, 1)) == [
        [Piece(2, 6, 7), Piece(0, 0, 3), Piece(3, 0, 2)]
    ]


def test_groups_of_similar_length_waste_little() -> None:
    lengths = [random.Random(seed).randrange(1, 200) for seed in range(50)] + [900]
    groups = similar_lengths(lengths, 512)
    assert sorted(row for group in groups for row in group) == list(range(51))
    for group in groups:
        longest = max(lengths[row] for row in group)
        assert len(group) * longest <= max(512, longest)
    assert similar_lengths([2, 3, 7, 3], 6) == [[2], [1, 3], [0]]  # filled to the last token
    assert similar_lengths([], 6) == []
