"""A drafter's share in its target, its drafts of a reduced vocabulary, and its tensors that travel."""

import json
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.conftest import save_policy
from tests.support.drafters.draft_texts import (
    alone,
    draft_logits,
    make_drafter,
    quality_on,
    random_sequence,
    read_by_target,
)
from tests.support.drafters.eagle_head import make_head, save_head
from tlt_lightning.adapters import LoRA
from tlt_lightning.drafter.architectures.eagle3 import Eagle3
from tlt_lightning.drafter.architectures.training_time_test import step_masks, unroll
from tlt_lightning.drafter.head import choose_settings
from tlt_lightning.drafter.module import DrafterModule
from tlt_lightning.drafter.quality import AcceptanceRule, DraftQuality
from tlt_lightning.drafter.target import choose_layer_ids
from tlt_lightning.drafter.teaching import Teaching
from tlt_lightning.drafter.vocabulary import count_tokens, draft_ids, drafted_tokens
from tlt_lightning.engine.vllm.drafter_weights import check_tensors
from tlt_lightning.policy import PolicyWeights, load_policy
from tlt_lightning.speculation.head_files import read_head


@pytest.fixture(scope="module")
def drafter(policy_path: str) -> DrafterModule:
    return make_drafter(policy_path)


@pytest.fixture(scope="module")
def reduced(policy_path: str) -> DrafterModule:
    """Drafts the tokens 8 to 22 alone, and 1, which ends a text."""
    drafter = DrafterModule(policy_path, draft_vocab_size=16)
    drafter.choose_vocabulary(torch.tensor([0] * 8 + [5] * 15 + [1] * 9))
    drafter.configure_model()
    return drafter


def test_a_new_head_is_trained_by_muon_and_one_that_drafts_gently_by_adam(policy_path: str, tmp_path: Path) -> None:
    new = make_drafter(policy_path)
    given = DrafterModule(policy_path, head=str(new.export(tmp_path / "head")))
    given.configure_model()
    assert type(new.configure_optimizers()).__name__ == "MuonWithAuxAdam"
    optimizer = given.configure_optimizers()
    assert (type(optimizer).__name__, optimizer.param_groups[0]["lr"]) == ("AdamW", 1e-4)


# What it shares with its target


@pytest.mark.parametrize("architecture", ["qwen2", "llama"])
def test_embedding_and_head_are_the_targets_and_frozen(architecture: str, policy_path: str, llama_path: str) -> None:
    path = {"qwen2": policy_path, "llama": llama_path}[architecture]
    head, policy = make_drafter(path).head, load_policy(path)
    assert torch.equal(head.embed_tokens.weight, policy.get_input_embeddings().weight)
    assert torch.equal(head.lm_head.weight, policy.get_output_embeddings().weight)
    assert torch.equal(head.verifier_norm.weight, policy.model.norm.weight)
    assert (head.lm_head.weight is head.embed_tokens.weight) == (architecture == "qwen2")  # tied there
    frozen = {name for name, p in head.named_parameters(remove_duplicate=False) if not p.requires_grad}
    assert frozen == {f"{name}.weight" for name in ("embed_tokens", "lm_head", "verifier_lm_head", "verifier_norm")}


def test_targets_are_what_the_policy_predicts(policy_path: str) -> None:
    drafter, policy = make_drafter(policy_path), load_policy(policy_path)
    ids = random_sequence(50).input_ids
    (sequence,) = read_by_target(policy, [ids.tolist()], 1, drafter.layer_ids)
    head = drafter.head
    logits = head.verifier_lm_head(head.verifier_norm(alone(sequence).last_states[0, :48]))
    torch.testing.assert_close(logits, policy(ids[None]).logits[0, 1:49], atol=1e-4, rtol=1e-4)


def test_positions_are_the_targets(tmp_path: Path) -> None:
    rope = {"rope_type": "linear", "factor": 4.0, "rope_theta": 300.0}
    save_policy(tmp_path, "llama", rope_parameters=rope, head_dim=16, max_position_embeddings=777)
    head, policy = make_drafter(str(tmp_path)).head, load_policy(str(tmp_path))
    places = torch.arange(40)[None]
    theirs = policy.model.rotary_emb(torch.zeros(1), places)
    torch.testing.assert_close(head.rotary_emb(torch.zeros(1), places), theirs)
    assert head.config.transformer_layer_config.max_position_embeddings == 777


@pytest.mark.parametrize("lora", [None, LoRA(rank=2), LoRA(rank=2, target_modules=["embed_tokens", "lm_head"])])
def test_refreshed_it_holds_the_live_policys_weights(llama_path: str, lora: LoRA | None) -> None:
    policy, drafter = load_policy(llama_path, lora=lora), make_drafter(llama_path)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    before = {name: p.clone() for name, p in policy.named_parameters()}
    mine = {name: tensor.clone() for name, tensor in drafter.trainable_tensors()}
    drafter.refresh_target(policy)
    live, head = dict(PolicyWeights(policy)), drafter.head
    torch.testing.assert_close(head.embed_tokens.weight.data, live["model.embed_tokens.weight"])
    torch.testing.assert_close(head.lm_head.weight.data, live["lm_head.weight"])
    torch.testing.assert_close(head.verifier_norm.weight.data, live["model.norm.weight"])
    assert head.lm_head.weight is head.verifier_lm_head.weight
    assert all(torch.equal(p, before[name]) for name, p in policy.named_parameters())
    assert all(torch.equal(tensor, mine[name]) for name, tensor in drafter.trainable_tensors())


def test_tied_embedding_is_refreshed_for_the_output_too(policy_path: str) -> None:
    policy, drafter = load_policy(policy_path), make_drafter(policy_path)
    with torch.no_grad():
        policy.get_input_embeddings().weight.mul_(3)
    drafter.refresh_target(policy)
    assert torch.equal(drafter.head.verifier_lm_head.weight, policy.get_input_embeddings().weight)
    assert drafter.head.verifier_lm_head.weight.data_ptr() != policy.get_input_embeddings().weight.data_ptr()


# A reduced vocabulary


def test_only_chosen_tokens_are_drafted(reduced: DrafterModule) -> None:
    assert drafted_tokens(reduced.head.d2t).tolist() == [1, *range(8, 23)]
    assert draft_ids(reduced.head, torch.tensor([1, 7, 8, 22, 23])).tolist() == [0, -1, 1, 15, -1]


def test_tokens_outside_the_vocabulary_do_not_count(reduced: DrafterModule) -> None:
    batch = alone(random_sequence(60, 1), 128)
    counts = step_masks(batch, 2, reduced.head.t2d)
    is_drafted = torch.isin(batch.next_ids[0, :58], torch.tensor([1, *range(8, 23)]))
    assert torch.equal(counts[0, :58], is_drafted)
    assert torch.equal(counts[1, :57], is_drafted[1:])
    assert 0 < counts.sum() < 2 * 58


def test_its_rows_of_the_policys_head_travel(reduced: DrafterModule, policy_path: str, tmp_path: Path) -> None:
    policy = load_policy(policy_path)
    with torch.no_grad():
        policy.get_input_embeddings().weight.mul_(2)
    reduced.refresh_target(policy)
    sent = dict(reduced.trainable_tensors())
    assert torch.equal(sent["lm_head.weight"], policy.get_input_embeddings().weight[[1, *range(8, 23)]])
    check_tensors(sent, read_head(str(reduced.export(tmp_path))).tensors, shares_head=False)


def test_a_vocabulary_is_chosen_when_text_is_there_and_found_again(policy_path: str) -> None:
    drafter, resumed = (make_drafter(policy_path, draft_vocab_size=16) for _ in range(2))
    policy = load_policy(policy_path)
    assert drafter.needs_vocabulary
    assert drafter.vocabulary is None
    assert drafted_tokens(drafter.head.d2t).tolist() == list(range(16))
    drafter.choose_vocabulary(torch.tensor([0] * 30 + [2, 9]))
    drafter.refresh_target(policy)
    drafted = [*range(14), 30, 31]
    assert not drafter.needs_vocabulary
    assert drafted_tokens(drafter.head.d2t).tolist() == drafted
    rows = policy.get_output_embeddings().weight[drafted]
    assert torch.equal(dict(drafter.trainable_tensors())["lm_head.weight"], rows)
    assert torch.equal(drafter.head.verifier_lm_head.weight, rows)
    assert drafter.vocabulary is not None
    resumed.load_vocabulary(drafter.vocabulary)
    assert not resumed.needs_vocabulary
    assert torch.equal(resumed.head.d2t, drafter.head.d2t)
    assert torch.equal(resumed.head.lm_head.weight, rows)
    without = torch.arange(32) >= 16  # as an older checkpoint may have it
    resumed.load_vocabulary(without)
    assert torch.equal(resumed.vocabulary, without)
    with pytest.raises(ValueError, match=r"drafts 16 tokens, this one 32: set `drafter\.draft_vocab_size` to 16"):
        make_drafter(policy_path).load_vocabulary(drafter.vocabulary)


def test_every_token_that_ends_a_text_is_drafted(policy_path: str, tmp_path: Path) -> None:
    policy = shutil.copytree(policy_path, tmp_path / "policy")
    (policy / "generation_config.json").write_text(json.dumps({"eos_token_id": [30, 32]}))  # there is no token 32
    drafter, counts = make_drafter(str(policy), draft_vocab_size=4), torch.arange(32)
    drafter.choose_vocabulary(counts.flip(0))
    assert drafted_tokens(drafter.head.d2t).tolist() == [0, 1, 2, 30]
    drafter.choose_vocabulary(0 * counts)
    assert drafted_tokens(drafter.head.d2t).tolist() == [0, 1, 2, 30]


@pytest.mark.parametrize(("vocab_size", "expected"), [(64_000, 64_000), (64_001, 32_000), (152_064, 32_000)])
def test_a_new_head_drafts_32_000_of_many_tokens(vocab_size: int, expected: int) -> None:
    config: Any = SimpleNamespace(num_hidden_layers=4, vocab_size=vocab_size)
    assert choose_settings(Eagle3(), "target", config, None, None, None, 3).draft_vocab_size == expected
    assert choose_settings(Eagle3(), "target", config, None, None, vocab_size, 3).draft_vocab_size == vocab_size


def test_tokens_are_counted_without_padding() -> None:
    counts = count_tokens(torch.tensor([[3, 3, 5, 0], [5, 1, 0, 0]]), torch.tensor([3, 2]), 7)
    assert counts.tolist() == [0, 1, 0, 2, 0, 2, 0]


# What travels


def test_random_weights_are_the_same_everywhere(policy_path: str) -> None:
    torch.manual_seed(1)
    state = torch.get_rng_state()
    one = dict(make_drafter(policy_path).trainable_tensors())
    assert torch.equal(torch.get_rng_state(), state)  # and cost the run no random numbers
    torch.manual_seed(2)
    other = dict(make_drafter(policy_path).trainable_tensors())
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert not torch.equal(one["fc.weight"], dict(make_drafter(policy_path, seed=1).trainable_tensors())["fc.weight"])


def test_the_engine_accepts_what_travels(drafter: DrafterModule, tmp_path: Path) -> None:
    sent = dict(drafter.trainable_tensors())
    assert "lm_head.weight" not in sent
    assert all(tensor.isfinite().all() and not tensor.requires_grad for tensor in sent.values())
    shape = read_head(str(drafter.export(tmp_path)))
    check_tensors(sent, shape.tensors, shares_head=True)
    assert set(shape.tensors) == set(sent)  # the policy's own tensors are not in the file
    assert shape.layer_ids == drafter.layer_ids == (0, 1, 2)


def test_weights_are_taken_over_whole_or_not_at_all(policy_path: str) -> None:
    source, drafter = make_drafter(policy_path, seed=1), make_drafter(policy_path)
    tensors = dict(source.trainable_tensors())
    with pytest.raises(ValueError, match=r"norm\.weight"):
        drafter.load_trainable({name: tensor for name, tensor in tensors.items() if name != "norm.weight"})
    drafter.load_trainable(tensors)
    batch = alone(random_sequence(60))
    assert drafter.loss(batch)[0] == source.loss(batch)[0]


@pytest.mark.parametrize("name", ["drafter", "reduced"])
def test_an_exported_head_is_loaded_again(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    source: DrafterModule = request.getfixturevalue(name)
    batch = alone(random_sequence(60))
    source.refresh_target(load_policy(source.target))  # an earlier test moved it
    path = source.export(tmp_path / "run" / "head", quality_on(source, [batch]))
    noise = torch.get_rng_state()
    loaded = make_drafter(source.target, head=str(path))
    assert torch.equal(torch.get_rng_state(), noise), "weights were drawn"
    assert loaded.follows_target
    assert loaded.layer_ids == source.layer_ids
    assert loaded.loss(batch)[0] == source.loss(batch)[0]
    assert {n for n, _ in loaded.trainable_tensors()} == {n for n, _ in source.trainable_tensors()}


def test_the_readme_says_what_was_measured(drafter: DrafterModule, tmp_path: Path) -> None:
    quality = DraftQuality((0.81, 0.62, 0.33), (0.9, 0.8, 0.7), (1.0, 0.9, 0.8), (0.1, 0.2, 0.3), num_steps=1234)
    text = (drafter.export(tmp_path, quality) / "README.md").read_text()
    assert "**2.76 tokens per step**" in text
    assert "| 2 | 62.0% | 80.0% | 90.0% |" in text
    assert "On 1234 engine steps of held-out text of its target, retraced with greedy drafts at temperature 1:" in text
    drafter.acceptance = AcceptanceRule(samples_drafts=True, temperature=0.7, top_k=20)
    assert "drafts at temperature 0.7, top_k 20:" in (drafter.export(tmp_path, quality) / "README.md").read_text()
    drafter.acceptance = AcceptanceRule()
    assert "Not measured" in (drafter.export(tmp_path) / "README.md").read_text()
    assert "then serve that one, as\n`python -m tlt_lightning export` writes it" in text  # trained meanwhile
    command = 'vllm() { echo "$4"; }\n    vllm serve' + text.partition("    vllm serve")[2].partition("\n\n")[0]
    assert json.loads(subprocess.check_output(["bash", "-c", command]))["num_speculative_tokens"] == 3


@pytest.mark.parametrize("is_pickled", [False, True])  # as the first EAGLE-3 heads were published
def test_heads_of_other_makers_keep_their_own_output(is_pickled: bool, tmp_path: Path) -> None:
    policy = str(save_policy(tmp_path / "policy", num_hidden_layers=4))
    foreign = make_head(policy, draft_vocab_size=24)
    torch.nn.init.normal_(foreign.lm_head.weight)
    head = save_head(foreign, tmp_path / "head")
    if is_pickled:
        torch.save(load_file(file := tmp_path / "head/model.safetensors"), tmp_path / "head/pytorch_model.bin")
        file.unlink()
    drafter = make_drafter(policy, head=head)
    assert not drafter.follows_target
    torch.testing.assert_close(drafter.head.lm_head.weight.data, foreign.lm_head.weight.data)
    drafter.refresh_target(load_policy(policy))
    torch.testing.assert_close(drafter.head.lm_head.weight.data, foreign.lm_head.weight.data)
    assert torch.equal(drafter.head.verifier_lm_head.weight, load_policy(policy).lm_head.weight[:24])
    embedded, hidden = drafter.head.embed_tokens.weight[None, 2:22], torch.randn(1, 20, 64)
    sequence = random_sequence(22)
    sequence.input_ids[1:21] = torch.arange(2, 22)
    sequence.states[:20] = torch.linalg.lstsq(foreign.fc.weight.double(), hidden[0].double().T).solution.T.float()
    features = unroll(drafter.head, alone(sequence), 1)
    expected = foreign.lm_head(foreign(embedded, hidden))
    torch.testing.assert_close(draft_logits(drafter.head, features)[:, :20], expected, atol=1e-4, rtol=1e-4)
    check_tensors(dict(drafter.trainable_tensors()), read_head(head).tensors, shares_head=False)


@pytest.mark.parametrize(
    ("num_layers", "expected"),
    [(2, (0, 1, 2)), (3, (1, 2, 3)), (4, (1, 2, 3)), (6, (1, 3, 5)), (7, (2, 3, 4)), (28, (2, 14, 25))],
)
def test_layers_are_chosen_as_vllm_does_where_it_can(num_layers: int, expected: tuple) -> None:
    assert choose_layer_ids(num_layers) == expected


def test_a_target_of_one_layer_has_too_few_states() -> None:
    with pytest.raises(ValueError, match="at least 2 layers"):
        choose_layer_ids(1)


def test_depth_of_training_follows_the_longest_draft_a_selector_may_ask_for(policy_path: str) -> None:
    drafter = DrafterModule(policy_path)
    assert (drafter.num_draft_tokens, drafter.num_steps) == (3, 3)
    drafter.follow_selector(7)
    assert (drafter.num_draft_tokens, drafter.num_steps) == (7, 7)
    drafter.configure_model()
    loss, metrics = drafter.loss(alone(random_sequence(60)))
    assert loss.isfinite()
    assert "drafter/top1_pos_7" in metrics
    asked = DrafterModule(policy_path, num_draft_tokens=4, teaching=Teaching(num_steps=2))
    asked.follow_selector(7)
    assert (asked.num_draft_tokens, asked.num_steps) == (4, 2)
