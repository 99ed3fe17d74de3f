"""A DSpark head: its pass and loss against those of `speculators`, in packs and pieces, saved and read again."""

from math import exp
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.drafters import block_reference as reference
from tests.support.drafters.draft_texts import alone, make_drafter, pack, quality_on, random_sequence, train
from tlt_lightning.drafter import chunked_loss
from tlt_lightning.drafter.architectures.base import Drafting
from tlt_lightning.drafter.architectures.dspark import DSpark, draft
from tlt_lightning.drafter.architectures.training_time_test import step_masks
from tlt_lightning.drafter.module import DrafterModule
from tlt_lightning.drafter.quality import AcceptanceRule
from tlt_lightning.engine.vllm.speculation import Speculation
from tlt_lightning.speculation import FixedSelector
from tlt_lightning.speculation.head_files import check_head, read_head

BLOCK = 5


def dspark(policy: str, *, anchors: int = 512, **arguments: Any) -> DrafterModule:
    architecture = DSpark(num_layers=2, block_size=BLOCK, markov_rank=8, anchors=anchors)
    return make_drafter(policy, architecture=architecture, **arguments)


@pytest.fixture(scope="module")
def drafter(policy_path: str) -> DrafterModule:
    return dspark(policy_path)


def gradients(drafter: DrafterModule, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    drafter.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in drafter.named_parameters() if p.grad is not None}


@pytest.mark.oracle
@pytest.mark.parametrize("logits_at_once", [2**27, 50 * 32])
def test_loss_and_gradients_are_those_of_speculators(
    drafter: DrafterModule, logits_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunked_loss, "_LOGITS", logits_at_once)
    text = random_sequence(60, 20)
    batch = alone(text, 128)
    masks = step_masks(batch, BLOCK - 1, None) & batch.loss_mask[0]  # `speculators` begins no block in a prompt
    decay = torch.tensor([exp(-k / 4) for k in range(BLOCK - 1)])[:, None]
    terms = chunked_loss.terms_of("kl_div", batch.states)
    _, ours = drafter.architecture.predict(drafter.head, batch, Drafting(terms, masks * decay / masks.sum()))
    our_gradients = gradients(drafter, ours)
    assert {"head.fc.weight", "head.markov_head.markov_w1.weight", "head.markov_head.markov_w2.weight"} <= set(
        our_gradients
    )
    theirs = reference.loss_of(drafter.head, reference.pack_of(text, BLOCK), num_anchors=40)
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(our_gradients, gradients(drafter, theirs), atol=1e-6, rtol=1e-5)


def test_acceptance_is_what_the_blocks_of_speculators_promise(drafter: DrafterModule) -> None:
    texts = [random_sequence(40, 9, seed=seed) for seed in (1, 2)]
    rules = [AcceptanceRule(), AcceptanceRule(samples_drafts=True)]
    expected = reference.measure(drafter.head, texts, rules)
    for rule, shares in zip(rules, expected, strict=True):
        drafter.acceptance = rule
        found = quality_on(drafter, pack(texts, 128))
        assert found.accepted == pytest.approx(shares.tolist(), rel=1e-5)


def test_blocks_in_packs_and_pieces_are_those_of_each_text_alone(drafter: DrafterModule) -> None:
    texts = [random_sequence(n) for n in (200, 60, 30)]
    packs = pack(texts, 128)
    assert any(context is not None for batch in packs for context in batch.contexts)
    whole = {len(text): draft(drafter.head, alone(text, 256), torch.arange(len(text) - 2)) for text in texts}
    for batch in packs:
        features = draft(drafter.head, batch, torch.arange(sum(batch.lengths)))
        for number in range(len(batch.lengths)):
            is_its = batch.document_ids[0] == number
            positions = batch.position_ids[0, is_its]
            ids = batch.input_ids[0, is_its]
            (text,) = (t for t in texts if len(t) > positions[-1] + 1 and torch.equal(t.input_ids[positions + 1], ids))
            expected = whole[len(text)][positions]
            torch.testing.assert_close(features[is_its[: len(features)]], expected, atol=1e-5, rtol=1e-4)


def test_a_pack_of_a_prompt_alone_is_judged_by_nothing(drafter: DrafterModule) -> None:
    batch = alone(random_sequence(100, 100), 128)
    assert not batch.loss_mask.any()
    assert drafter.measure(batch).count_nonzero() == 0
    assert drafter.loss(batch)[0] == 0


@pytest.mark.parametrize(("anchors", "used"), [(512, 98), (60, 60), (10, 10)])
def test_a_training_step_drafts_from_entries_at_even_distances(policy_path: str, anchors: int, used: int) -> None:
    drafter = dspark(policy_path, anchors=anchors)
    batch = alone(random_sequence(120, 21), 128)
    assert batch.loss_mask.sum() == 98
    rows = drafter.architecture.sample(batch)
    assert rows is not None
    gaps = torch.cat([rows[:used], torch.tensor([118])]).diff()
    assert rows[0] == 20
    assert {*gaps.tolist()} <= {98 // used, -(-98 // used)}
    assert len(rows) == min(128, anchors)
    loss, metrics = drafter.loss(batch)
    assert loss.isfinite()
    assert metrics["drafter/top1_pos_1"] <= 1


@pytest.mark.slow
def test_it_learns_and_goes_on_from_what_it_saved(policy_path: str, tmp_path: Path) -> None:
    drafter = dspark(policy_path, anchors=64)
    batches = pack([random_sequence(120, 5)], 128)
    before = quality_on(drafter, batches)
    train(drafter, batches, 60)
    after = quality_on(drafter, batches)
    assert max(after.loss) < 0.5 * min(before.loss)
    path = drafter.export(tmp_path / "head", after)
    shape = read_head(str(path))
    check_head(shape, policy_path)
    assert (shape.kind.method, shape.num_layers, shape.most_drafts) == ("dspark", 2, BLOCK - 1)
    assert '"method": "dspark"' in (path / "README.md").read_text()
    again = make_drafter(policy_path, head=str(path))
    assert again.num_draft_tokens == BLOCK - 1
    assert quality_on(again, batches).accepted == pytest.approx(after.accepted)
    with pytest.raises(ValueError, match="`architecture` is for a new head"):
        make_drafter(policy_path, head=str(path), architecture=DSpark())


@pytest.mark.vllm
@pytest.mark.skipif(torch.cuda.is_available(), reason="vLLM runs such a head on a GPU")
def test_a_machine_without_a_gpu_says_which_head_to_take(
    drafter: DrafterModule, policy_path: str, tmp_path: Path
) -> None:
    speculation = Speculation(selector=FixedSelector(2, "learned"), head=str(drafter.export(tmp_path / "head")))
    with pytest.raises(ValueError, match=r"is a DSpark head, which vLLM runs on a GPU alone.*adaptive_drafter\.yaml"):
        speculation.check(policy_path, 8)


@pytest.mark.parametrize("arguments", [{"block_size": 1}, {"block_size": 65}, {"num_layers": 0}, {"anchors": 1.5}])
def test_an_argument_out_of_its_bounds_is_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError), match=f"^`{next(iter(arguments))}` must be "):
        DSpark(**arguments)


def test_a_block_drafts_no_more_than_its_rows(policy_path: str) -> None:
    drafter = DrafterModule(policy_path, architecture=DSpark(block_size=BLOCK))
    drafter.follow_selector(7)
    assert drafter.num_draft_tokens == BLOCK - 1
    with pytest.raises(ValueError, match="num_draft_tokens"):
        DrafterModule(policy_path, architecture=DSpark(block_size=BLOCK), num_draft_tokens=5)


def test_its_masks_are_a_token_whose_embedding_the_policy_learns(drafter: DrafterModule) -> None:
    head: Any = drafter.head
    unlearned = drafter.target_config.pad_token_id
    assert head.embed_tokens.weight[unlearned].count_nonzero() == 0
    assert head.embed_tokens.weight[head.mask_token_id].count_nonzero() > 0


@pytest.mark.vllm
def test_vllm_lets_the_rows_of_a_block_see_each_other_as_in_training(drafter: DrafterModule, tmp_path: Path) -> None:
    from vllm.model_executor.models.qwen3_dflash import dflash_has_any_non_causal
    from vllm.transformers_utils.configs.speculators import SpeculatorsConfig

    drafter.export(tmp_path)
    assert dflash_has_any_non_causal(SpeculatorsConfig.from_pretrained(str(tmp_path)))
