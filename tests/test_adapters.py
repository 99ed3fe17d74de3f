import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.architectures import save_architecture
from tlt_lightning.adapters import LoRA, adapters_of, with_adapters
from tlt_lightning.policy import PolicyWeights, load_policy, load_shapes, merged, policy_shapes


def test_without_autocast_adapters_work_on_a_bfloat16_policy_too(policy_path: str) -> None:
    model = load_policy(policy_path, lora=LoRA(rank=4, base_dtype="bfloat16"))
    assert model(input_ids=torch.tensor([[1, 2, 3]])).logits.dtype == torch.bfloat16


def test_lora_streams_merged_weights_under_hugging_face_names(policy_path: str) -> None:
    model = load_policy(policy_path, lora=LoRA(rank=4))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    plain = load_policy(policy_path)
    missing = plain.load_state_dict(dict(PolicyWeights(model)), strict=False).missing_keys
    assert set(missing) <= {"lm_head.weight"}  # tied
    ids = torch.arange(2, 12)[None]
    torch.testing.assert_close(plain(input_ids=ids).logits, model(input_ids=ids).logits, atol=1e-4, rtol=1e-4)


def test_adapters_of_experts_are_merged_too(tmp_path: Path) -> None:
    path = save_architecture("qwen3_moe", tmp_path)
    model = load_policy(path, lora=LoRA(rank=2))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    plain = load_policy(path)
    assert PolicyWeights(model).shapes == PolicyWeights(plain).shapes == policy_shapes(path)
    before = plain.model.layers[0].mlp.experts.gate_up_proj.clone()
    plain.load_state_dict(dict(PolicyWeights(model)))
    assert not torch.equal(plain.model.layers[0].mlp.experts.gate_up_proj, before)
    ids = torch.arange(2, 12)[None]
    torch.testing.assert_close(plain(input_ids=ids).logits, model(input_ids=ids).logits, atol=1e-4, rtol=1e-4)


def test_streaming_does_not_merge_into_the_live_weights(policy_path: str) -> None:
    model = load_policy(policy_path, lora=LoRA(rank=4))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    for _ in range(2):
        list(PolicyWeights(model))
    assert all(torch.equal(before[name], parameter) for name, parameter in model.named_parameters())


def test_a_router_that_returns_two_tensors_has_no_adapter_and_the_experts_beside_it_have(tmp_path: Path) -> None:
    policy = load_policy(save_architecture("llama4_text", tmp_path), lora=LoRA(rank=2))
    logits = policy(input_ids=torch.arange(2, 8)[None]).logits  # with sums that are written into an adapter's output
    logits.sum().backward()
    adapted = {name.split(".lora_")[0].split(".")[-1] for name, p in policy.named_parameters() if p.grad is not None}
    assert adapted == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def test_a_router_that_is_a_plain_layer_has_an_adapter(policy_path: str) -> None:
    policy = load_policy(policy_path)
    policy.model.router = torch.nn.Linear(8, 2)
    assert "model.router.weight" in adapters_of(with_adapters(policy, LoRA(rank=2)))


@pytest.mark.parametrize("target", [["q_proj", "v_prjo"], ["norm"], "q_proj"])
def test_adapters_of_layers_that_are_not_there_are_refused(target: str | list[str], policy_path: str) -> None:
    with pytest.raises(ValueError, match=r"`lora\.target_modules` .* cannot be adapted: .*v_proj\], or 'all-linear'"):
        load_shapes(policy_path, LoRA(target_modules=target))


@pytest.mark.parametrize("target", [["lm_head"], ["q_proj", "embed_tokens"], ["lm_head", "embed_tokens"], ".*_head"])
def test_adapters_of_head_and_embedding_are_streamed_or_refused_where_these_are_one_tensor(
    target: str | list[str], tmp_path: Path
) -> None:
    lora = LoRA(rank=4, target_modules=target)
    tied = save_architecture("qwen2", tmp_path / "tied", tie_word_embeddings=True)
    for load in (load_shapes, lambda *given: load_policy(given[0], lora=given[1])):
        with pytest.raises(
            ValueError, match=r"`lora\.target_modules` .* one tensor \(`tie_word_embeddings`\).*all-linear"
        ):
            load(tied, lora)

    plain = AutoModelForCausalLM.from_pretrained(tied)
    plain.lm_head.weight = torch.nn.Parameter(plain.lm_head.weight.clone())  # as the message advises
    plain.config.tie_word_embeddings = False
    shutil.copytree(tied, tmp_path / "untied")
    plain.save_pretrained(tmp_path / "untied")
    policy = load_policy(str(tmp_path / "untied"), lora=lora)
    for name, parameter in policy.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    ids = torch.arange(2, 12)[None]
    with torch.no_grad():
        expected = policy(input_ids=ids).logits
        assert (plain(input_ids=ids).logits - expected).abs().max() > 0.1
        plain.load_state_dict(dict(PolicyWeights(policy)))
        torch.testing.assert_close(plain(input_ids=ids).logits, expected, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(merged(policy)(input_ids=ids).logits, expected, atol=1e-4, rtol=1e-4)
