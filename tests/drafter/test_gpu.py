"""The drafter on a GPU: fused losses, bfloat16, and not once a wait for the device."""

from dataclasses import fields

import pytest
import torch
from lightning.fabric.utilities import move_data_to_device

from tests.support.drafters.draft_texts import make_drafter, pack, quality_on, random_sequence, train
from tlt_lightning.drafter.architectures.dspark import DSpark
from tlt_lightning.drafter.packing import fill_pack, plan_packs
from tlt_lightning.drafter.quality import AcceptanceRule

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("loss", ["kl_div", "tv", "ce", "lk_hybrid"])
def test_loss_and_gradients_are_those_of_the_cpu(policy_path: str, loss: str) -> None:
    drafter = make_drafter(policy_path, loss=loss)
    (batch,) = pack([random_sequence(n, 5) for n in (100, 70, 30)], 256)
    expected, _ = drafter.loss(batch)
    expected.backward()
    gradients = {name: p.grad for name, p in drafter.named_parameters() if p.grad is not None}
    drafter.cuda().zero_grad()
    there = move_data_to_device(batch, torch.device("cuda"))
    with torch.autocast("cuda", torch.bfloat16):
        drafter.loss(there)  # kernels are tuned in the first call, which waits for them
        torch.cuda.set_sync_debug_mode("error")
        try:
            found, _ = drafter.loss(there)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    found.backward()
    assert found.item() == pytest.approx(expected.item(), rel=0.02)
    for name, p in drafter.named_parameters():
        if name in gradients:
            similarity = torch.cosine_similarity(p.grad.cpu().flatten(), gradients[name].cpu().flatten(), dim=0)
            assert similarity > 0.98, name


@pytest.mark.parametrize(("samples_drafts", "shares_noise"), [(False, False), (True, False), (True, True)])
def test_it_learns_and_is_measured_there(
    policy_path: str, samples_drafts: bool, shares_noise: bool, caplog: pytest.LogCaptureFixture
) -> None:
    drafter = make_drafter(policy_path).cuda()
    drafter.acceptance = AcceptanceRule(samples_drafts, 0.9, shares_noise)
    batches = pack([random_sequence(300, 5)], 384)
    there = move_data_to_device(batches, torch.device("cuda"))
    losses = train(drafter, there, num_steps=60)
    with torch.autocast("cuda", torch.bfloat16):
        found = quality_on(drafter, there)
    assert losses[-1] < 0.9 * losses[0]
    expected = quality_on(drafter.cpu(), batches)
    assert found.acceptance_length == pytest.approx(expected.acceptance_length, abs=0.05)
    assert found.top3 == pytest.approx(expected.top3, abs=0.1)
    assert "could not be compiled" not in caplog.text


def test_a_pack_reaches_the_device_without_a_wait_for_it() -> None:
    texts = [random_sequence(n, 5) for n in (300, 70, 30)]
    for plan in plan_packs([len(text) for text in texts], 128):  # the longest in pieces
        pieces = [(texts[piece.sequence], piece) for piece in plan]
        expected = fill_pack(pieces, 128)
        torch.cuda.set_sync_debug_mode("error")
        try:
            found = fill_pack(pieces, 128, torch.device("cuda"))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        for field in fields(expected):
            torch.testing.assert_close(getattr(found, field.name), getattr(expected, field.name), check_device=False)
        assert all(part.is_pinned() for context in found.contexts if context for part in context)


def test_a_block_learns_there_without_a_wait(policy_path: str) -> None:
    drafter = make_drafter(policy_path, architecture=DSpark(num_layers=2, block_size=5, markov_rank=8, anchors=64))
    (batch,) = pack([random_sequence(n, 5) for n in (100, 70, 30)], 256)
    expected, _ = drafter.loss(batch)
    expected_quality = quality_on(drafter, [batch])
    drafter.cuda()
    there = move_data_to_device(batch, torch.device("cuda"))
    with torch.autocast("cuda", torch.bfloat16):
        drafter.loss(there)[0].backward()
        torch.cuda.set_sync_debug_mode("error")
        try:
            found, _ = drafter.loss(there, compares=False)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        quality = quality_on(drafter, [there])
    assert found.item() == pytest.approx(expected.item(), rel=0.02)
    assert quality.acceptance_length == pytest.approx(expected_quality.acceptance_length, abs=0.05)
    losses = train(drafter, [there], num_steps=60)
    assert losses[-1] < 0.9 * losses[0]
