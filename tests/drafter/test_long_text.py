"""Texts longer than a pack: pieces see all that is before them."""

from pathlib import Path

import pytest
import torch

from tests.conftest import save_policy
from tests.support.drafters.draft_texts import alone, make_drafter, pack, random_sequence, train
from tlt_lightning.drafter.architectures import training_time_test
from tlt_lightning.drafter.architectures.training_time_test import unroll
from tlt_lightning.drafter.module import DrafterModule
from tlt_lightning.drafter.packing import PackedBatch, Piece, fill_pack
from tlt_lightning.drafter.teaching import Teaching

LENGTH, PACK = 600, 128
STEPS = 3


@pytest.fixture(scope="module", params=[(4, 2), (4, 4)], ids=["grouped keys", "a key a head"])
def policy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    heads, key_heads = request.param
    folder = tmp_path_factory.mktemp("policy")
    sizes = {"num_attention_heads": heads, "num_key_value_heads": key_heads, "max_position_embeddings": 1024}
    return str(save_policy(folder, **sizes))


@pytest.fixture(scope="module")
def drafter(policy: str) -> DrafterModule:
    return make_drafter(policy, teaching=Teaching(num_steps=STEPS))


def cut(length: int = LENGTH) -> tuple[PackedBatch, list[PackedBatch]]:
    """A text uncut, and in packs, among others."""
    text, num_entries = random_sequence(length, 8), length - 2
    whole = alone(text, 1024)
    others = random_sequence(30, 8, seed=9), Piece(1, 0, 28)
    pieces = [Piece(0, at, min(at + 90, num_entries)) for at in range(0, num_entries, 90)]
    return whole, [fill_pack([others, (text, piece)], PACK) for piece in pieces]


@pytest.mark.parametrize("rows", [1024, 64])
def test_every_entry_of_a_piece_has_the_features_that_it_has_in_the_whole_text(
    rows: int, drafter: DrafterModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training_time_test, "_ROWS", rows)  # a context is read at once, or in parts
    whole, packs = cut()
    expected = unroll(drafter.head, whole, STEPS)
    for number, batch in enumerate(packs):
        features = unroll(drafter.head, batch, STEPS)
        here = batch.document_ids[0] == 1
        entries = batch.position_ids[0, here]
        assert entries[0] == 90 * number
        for step in range(STEPS):  # the last entries have no text in their pack to feed back
            kept = len(entries) - step
            torch.testing.assert_close(
                features[step, here][:kept], expected[step, entries[:kept]], atol=1e-5, rtol=1e-5
            )


def test_the_pieces_lose_what_the_whole_text_does_but_for_drafts_beyond_a_cut(policy: str) -> None:
    for num_steps, lost in ((1, 0), (STEPS, 1 + 2)):
        drafter = make_drafter(policy, teaching=Teaching(num_steps=num_steps), num_draft_tokens=num_steps)
        whole, packs = cut()
        expected = drafter.measure(whole).sum(0)
        found = sum(drafter.measure(batch)[1] for batch in packs)
        num_cuts = len(packs) - 1
        assert (expected[5] - found[5]).sum() == lost * num_cuts
        if num_steps == 1:
            torch.testing.assert_close(found[2:], expected[2:], atol=1e-5, rtol=1e-5)


def test_pieces_are_read_in_mixed_precision(drafter: DrafterModule) -> None:
    _, packs = cut()
    losses, gradients = [], []
    for is_mixed in (False, True):
        drafter.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=is_mixed):
            loss, _ = drafter.loss(packs[-2])
        loss.backward()
        losses.append(loss.item())
        # Autocast keeps the weight that it casts first: for the context, which teaches nothing.
        gradients.append(drafter.head.fc.weight.grad.flatten())
    assert losses[1] == pytest.approx(losses[0], rel=0.02)
    assert torch.cosine_similarity(*gradients, dim=0) > 0.99


def test_without_what_is_before_them_pieces_differ(drafter: DrafterModule) -> None:
    whole, packs = cut()
    expected = unroll(drafter.head, whole, 1)
    batch = packs[2]
    batch.contexts = (None, None)
    here = batch.document_ids[0] == 1
    features = unroll(drafter.head, batch, 1)
    assert not torch.allclose(features[0, here], expected[0, batch.position_ids[0, here]], atol=1e-3)


def test_every_entry_of_long_texts_is_in_one_pack_with_all_before_it() -> None:
    batches = pack([random_sequence(LENGTH, seed=seed) for seed in range(2)], PACK)
    seen = []
    for batch in batches:
        starts = torch.tensor([0, *batch.lengths]).cumsum(0)[:-1]
        for start, context in zip(starts, batch.contexts, strict=True):
            first = int(batch.position_ids[0, start])
            assert first == (0 if context is None else len(context.input_ids))
        seen += batch.position_ids[batch.document_ids >= 0].tolist()
    assert sorted(seen) == sorted(2 * list(range(LENGTH - 2)))


@pytest.mark.slow
def test_a_text_of_32k_tokens_is_trained_and_judged_with_all_of_it(tmp_path: Path) -> None:
    length, width = 32_768, 32
    sizes = {"hidden_size": width, "intermediate_size": 32, "num_attention_heads": 1, "num_key_value_heads": 1}
    policy = str(save_policy(tmp_path, **sizes, max_position_embeddings=length))
    drafter = make_drafter(policy, num_draft_tokens=1)
    text = random_sequence(length, 8, width=width)
    packs = pack([text], 4096)
    assert len(packs) == 8
    expected = drafter.measure(alone(text, length)).sum(0)
    found = sum(drafter.measure(batch).sum(0) for batch in packs)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-5)  # all its entries, each with all before it
    train(drafter, packs, len(packs))
    after = sum(drafter.measure(batch).sum(0) for batch in packs)
    assert after[4] < found[4]  # its loss
