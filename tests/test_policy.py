import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.support.architectures import save_architecture, save_longrope
from tests.support.tensor_sizes import LargestOfWidth, MostAtOnceOfWidth
from tlt_lightning.adapters import LoRA
from tlt_lightning.policy import (
    PolicyWeights,
    end_token_ids,
    load_policy,
    load_tokenizer,
    policy_shapes,
    response_logps,
    token_logps,
)
from tlt_lightning.rollout import RolloutBatch


def make_batch(prompt_lengths: list[int], response_lengths: list[int], vocab_size: int = 32) -> RolloutBatch:
    generator = torch.Generator().manual_seed(0)
    num_rows, width = len(prompt_lengths), max(p + r for p, r in zip(prompt_lengths, response_lengths, strict=True))
    steps = torch.arange(max(response_lengths))
    mask = (steps < torch.tensor(response_lengths)[:, None]).float()
    return RolloutBatch(
        input_ids=torch.randint(2, vocab_size, (num_rows, width), generator=generator),
        prompt_lengths=torch.tensor(prompt_lengths),
        response_mask=mask,
        rollout_logps=torch.zeros_like(mask),
        rewards=torch.zeros(num_rows),
        groups=torch.arange(num_rows),
        policy_versions=torch.zeros(num_rows, dtype=torch.long),
        truncated=torch.zeros(num_rows, dtype=torch.bool),
        temperature=0.7,
    )


def naive_logps(model: torch.nn.Module, batch: RolloutBatch, row: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropies of one unpadded sequence, from the full logits."""
    start, length = int(batch.prompt_lengths[row]), int(batch.response_lengths[row])
    ids = batch.input_ids[row : row + 1, : start + length]
    logps = (model(input_ids=ids).logits[0, start - 1 : -1] / batch.temperature).log_softmax(-1)
    return logps.gather(-1, ids[0, start:, None]).squeeze(-1), -(logps.exp() * logps).sum(-1)


def chunked(model: torch.nn.Module, batch: RolloutBatch, chunk_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return response_logps(model, batch, chunk_size=chunk_size, needs_entropy_grad=True)[:2]


@pytest.mark.parametrize("chunk_size", [1, 4, 1000])
def test_chunked_logps_and_entropies_equal_those_of_each_sequence_alone(policy_path: str, chunk_size: int) -> None:
    model = load_policy(policy_path)
    batch = make_batch([3, 5, 4], [6, 1, 9])
    logps, entropy = chunked(model, batch, chunk_size)
    for row in range(3):
        expected_logps, expected_entropy = naive_logps(model, batch, row)
        length = len(expected_logps)
        torch.testing.assert_close(logps[row, :length], expected_logps, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(entropy[row, :length], expected_entropy, atol=1e-5, rtol=1e-5)
        assert not logps[row, length:].any()


def test_a_class_that_names_another_trunk_than_it_has_is_read_by_its_own(tmp_path: Path) -> None:
    model, batch = load_policy(save_architecture("llama4_text", tmp_path)), make_batch([3, 5], [6, 2])
    for row, logps in enumerate(chunked(model, batch, 4)[0]):
        expected, _ = naive_logps(model, batch, row)
        torch.testing.assert_close(logps[: len(expected)], expected, atol=1e-5, rtol=1e-5)


def test_shapes_are_those_of_classes_too_that_are_not_built_with_every_attention(tmp_path: Path) -> None:
    path = save_architecture("gptj", tmp_path)
    policy = load_policy(path, attn_implementation="eager")
    assert policy_shapes(path) == {name: tuple(weight.shape) for name, weight in PolicyWeights(policy)}


def test_gradients_do_not_depend_on_the_chunks(policy_path: str) -> None:
    gradients = []
    for chunk_size in (2, 1000):
        model = load_policy(policy_path)
        logps, entropy = chunked(model, make_batch([3, 5], [6, 4]), chunk_size)
        (logps.sum() + entropy.sum()).backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


def test_no_tensor_over_the_whole_vocabulary_is_larger_than_a_chunk(policy_path: str) -> None:
    head, states = torch.nn.Linear(8, 4096, bias=False), torch.randn(64, 8, requires_grad=True)
    with LargestOfWidth(4096) as largest:
        logps, *_ = token_logps(head, states, torch.zeros(64, dtype=torch.long), temperature=1.0, chunk_size=8)
        logps.sum().backward()
    assert largest.rows == 8


@pytest.mark.parametrize("num_chunks", [2, 8])
def test_no_chunk_leaves_logits_to_those_after_it(num_chunks: int) -> None:
    head, states = torch.nn.Linear(8, 4096, bias=False), torch.randn(8 * num_chunks, 8, requires_grad=True)
    targets = torch.zeros(len(states), dtype=torch.long)
    head.requires_grad_(False)
    with MostAtOnceOfWidth(4096) as most:
        logps, entropy, _ = token_logps(head, states, targets, temperature=1.0, chunk_size=8)
        logps.sum().backward()
    assert not entropy.requires_grad
    assert most.rows <= 8 * 6


def test_full_weights_are_streamed_without_a_copy(policy_path: str) -> None:
    model = load_policy(policy_path)
    pointers = {parameter.data_ptr() for parameter in model.parameters()}
    assert {tensor.data_ptr() for _, tensor in PolicyWeights(model)} == pointers


def test_policy_is_in_train_mode_without_dropout(policy_path: str) -> None:
    model = load_policy(policy_path)
    assert model.training
    assert all(m.p == 0 for m in model.modules() if isinstance(m, torch.nn.Dropout))


@pytest.mark.parametrize(
    ("model_type", "overrides"),
    [
        ("qwen2", {"attention_dropout": 0.3}),
        ("opt", {"dropout": 0.3, "attention_dropout": 0.3, "layerdrop": 0.5}),
        ("seed_oss", {"attention_dropout": 0.3, "residual_dropout": 0.3}),
        ("mixtral", {"router_jitter_noise": 0.3}),
    ],
)
def test_noise_kept_as_a_number_is_off_too(model_type: str, overrides: dict[str, float], tmp_path: Path) -> None:
    model = load_policy(save_architecture(model_type, tmp_path, **overrides))
    assert model.training
    ids = torch.arange(2, 26)[None]
    with torch.no_grad():
        first, second = model(input_ids=ids).logits, model(input_ids=ids).logits
        assert torch.equal(first, second)
        torch.testing.assert_close(model.eval()(input_ids=ids).logits, first)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "overrides"),
    [
        ("cohere", {"logit_scale": 0.25}),
        ("granite", {"logits_scaling": 8.0}),
        ("gemma2", {"final_logit_softcapping": 3.0}),
        ("gemma2", {"initializer_range": 0.02}),  # logits so small that the cap of 30 is not felt yet
        ("falcon_h1", {"lm_head_multiplier": 0.25}),
    ],
)
def test_heads_that_are_more_than_linear_are_refused(
    model_type: str, overrides: dict[str, float], tmp_path: Path
) -> None:
    path = save_architecture(model_type, tmp_path, **overrides)
    with pytest.raises(ValueError, match=r"differ from its head's output by \d.*ForCausalLM is supported only without"):
        load_policy(path)


def test_a_head_of_zeros_draws_all_tokens_alike(llama_path: str, tmp_path: Path) -> None:
    shutil.copytree(llama_path, tmp_path / "policy")
    tensors = load_file(tmp_path / "policy" / "model.safetensors")
    tensors["lm_head.weight"].zero_()
    save_file(tensors, tmp_path / "policy" / "model.safetensors", metadata={"format": "pt"})
    logps = response_logps(load_policy(str(tmp_path / "policy")), make_batch([3], [2])).logps
    torch.testing.assert_close(logps.detach(), torch.full((1, 2), -math.log(len(tensors["lm_head.weight"]))))


def save_tensors(path: str, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, Path(path) / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda name: None if name == "lm_head.weight" else name, r"lack lm_head\.weight:"),
        (lambda name: None if ".layers.1." in name else name, r"lack model\.layers\.1\..* and \d+ more:"),
        (lambda name: f"module.{name}", r"lack lm_head\.weight, .* and hold besides module\.lm_head\.weight, "),
    ],
)
def test_a_policy_without_some_weights_is_refused_by_their_names(
    change: Callable[[str], str | None], fault: str, tmp_path: Path
) -> None:
    path = save_architecture("qwen2", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_tensors(path, {change(name): value for name, value in tensors.items() if change(name)})
    with pytest.raises(ValueError, match=rf"^The files of `reference` '.*' {fault}"):
        load_policy(path, "reference")


def test_a_policy_with_weights_of_another_shape_is_refused_by_their_names(tmp_path: Path) -> None:
    path = save_architecture("qwen2", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_tensors(path, tensors | {"model.norm.weight": torch.ones(7)})
    with pytest.raises(ValueError, match=r"hold in another shape model\.norm\.weight: .* `save_pretrained`"):
        load_policy(path)


def test_a_tied_policy_needs_no_head_in_its_files_and_a_trunk_needs_none_either(tmp_path: Path) -> None:
    tied = save_architecture("qwen2", tmp_path / "tied", tie_word_embeddings=True)
    assert "lm_head.weight" not in load_file(tmp_path / "tied" / "model.safetensors")
    load_policy(tied)
    path = save_architecture("qwen2", tmp_path / "reward_model")
    tensors = load_file(tmp_path / "reward_model" / "model.safetensors")
    save_tensors(path, {"score.weight": torch.ones(1, 64), **tensors} | {"lm_head.weight": torch.ones(3, 3)})
    with pytest.raises(ValueError, match="lm_head"):
        load_policy(path)
    del tensors["lm_head.weight"]
    save_tensors(path, {"score.weight": torch.ones(1, 64), **tensors})
    load_policy(path, "critic.path", needs_head=False)


def test_a_file_that_is_cut_off_is_named(tmp_path: Path) -> None:
    path = save_architecture("qwen2", tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"`policy` '.*': model\.safetensors cannot be read \(.*Copy or download it"):
        load_policy(path)


def test_merged_weights_beside_their_adapter_are_refused(policy_path: str, tmp_path: Path) -> None:
    folder = shutil.copytree(policy_path, tmp_path / "policy")
    load_policy(policy_path, lora=LoRA(rank=4)).save_pretrained(folder)  # as PEFT does, then merged weights beside it
    with pytest.raises(ValueError, match=r"`policy` '.*' holds an adapter, adapter_config\.json, .*Remove that file"):
        load_policy(str(folder))


def test_within_its_original_length_a_longrope_policy_packs_as_it_reads_alone(tmp_path: Path) -> None:
    policy = load_policy(save_longrope(tmp_path)).eval()
    batch = make_batch([3, 5], [6, 27])
    assert int(batch.lengths.max()) == 32
    logps = chunked(policy, batch, 1000)[0]
    for row in range(2):
        expected = naive_logps(AutoModelForCausalLM.from_pretrained(tmp_path), batch, row)[0]
        torch.testing.assert_close(logps[row, : len(expected)], expected, atol=1e-5, rtol=1e-5)


def test_weights_that_are_no_numbers_are_refused(policy_path: str, tmp_path: Path) -> None:
    shutil.copytree(policy_path, tmp_path / "policy")
    tensors = load_file(tmp_path / "policy" / "model.safetensors")
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, tmp_path / "policy" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="its files hold NaN or infinite weights"):
        load_policy(str(tmp_path / "policy"))


def test_a_generic_tokenizer_beside_a_qwen2_config_keeps_its_decoder(policy_path: str) -> None:
    assert load_tokenizer(policy_path).decode([13, 14, 5, 15]) == "1 2 + 3"


def test_a_folder_without_tokenizer_files_is_refused(policy_path: str, tmp_path: Path) -> None:
    import shutil

    path = shutil.copytree(policy_path, tmp_path / "policy", ignore=shutil.ignore_patterns("tokenizer*"))
    with pytest.raises(ValueError, match=r"tokenizer of `policy` '.*policy' has no tokens but special ones"):
        load_tokenizer(str(path))


def test_end_tokens_come_from_tokenizer_and_generation_config(policy_path: str, tmp_path: Path) -> None:
    assert end_token_ids(policy_path, load_tokenizer(policy_path)) == [1]
    path = tmp_path / "policy"
    shutil.copytree(policy_path, path)
    (path / "generation_config.json").write_text('{"eos_token_id": [1, 7]}')
    assert end_token_ids(str(path), load_tokenizer(str(path))) == [1, 7]


def test_end_tokens_of_the_config_alone_count_as_transformers_counts_them(tmp_path: Path) -> None:
    path = save_architecture("qwen2", tmp_path, eos_token_id=[1, 7])
    (tmp_path / "generation_config.json").unlink()
    assert end_token_ids(path, load_tokenizer(path)) == [1, 7]
    assert AutoModelForCausalLM.from_pretrained(path).generation_config.eos_token_id == [1, 7]
