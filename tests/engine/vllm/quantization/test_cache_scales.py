"""Scales of an 8-bit KV cache: nothing that a policy computes exceeds them, and an engine's follow the weights."""

import math
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.conftest import save_policy
from tests.support.architectures import save_architecture
from tests.support.speculation_engines import PROMPTS, engine_of
from tlt_lightning.engine import Quantization, VLLMEngine
from tlt_lightning.engine.vllm.quantization.cache_scales import LARGEST, CacheScales, check_bounded, norm_offset
from tlt_lightning.policy import PolicyWeights, load_policy, policy_shapes
from tlt_lightning.rollout import Request, Sampling


def with_outliers(policy: nn.Module, keeps_differences: bool) -> None:
    """Move the policy's norms a little from one, of which it may keep the differences, and biases far."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if name.endswith("norm.weight"):
                parameter.fill_(0 if keeps_differences else 1)
            if parameter.ndim == 1:
                moved = 0.02 if name.endswith("norm.weight") or keeps_differences else 300
                parameter.add_(moved * torch.randn(parameter.shape, generator=generator))


def largest_seen(policy: nn.Module, monkeypatch: pytest.MonkeyPatch) -> list[list[float]]:
    """Return the largest query, key and value of each layer, as attention gets them, over random texts."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    seen: list[list[float]] = []

    def attend(module: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append([float(each.abs().max()) for each in (query, key, value)])
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=True
        ).transpose(1, 2), None

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "seen", attend)
    policy.config._attn_implementation = "seen"  # type: ignore[union-attr]
    ids = torch.randint(0, 32, (16, 64), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        policy(input_ids=ids)
    return seen


OVERRIDES: dict[str, dict[str, Any]] = {
    "gemma2": {"final_logit_softcapping": None},
    "cohere": {"use_qk_norm": True, "hidden_size": 128},  # heads of more numbers than there are heads
}
KEEP_DIFFERENCES = ("gemma", "gemma2", "gemma3_text", "nemotron", "vaultgemma")


@pytest.mark.parametrize(
    "model_type",
    ["qwen2", "qwen3", "llama", "mistral", "phi", "smollm3", "granite", "olmoe", "cohere", *KEEP_DIFFERENCES],
)
def test_no_query_key_or_value_exceeds_its_scale(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM

    path = save_architecture(model_type, tmp_path, **OVERRIDES.get(model_type, {}))
    policy = AutoModelForCausalLM.from_pretrained(path)
    names = dict(policy.named_parameters())
    check_bounded(names)
    config: Any = SimpleNamespace(
        cache_config=SimpleNamespace(cache_dtype="fp8"), model_config=SimpleNamespace(model=path)
    )
    scales = CacheScales.of(SimpleNamespace(vllm_config=config), names)
    assert scales is not None
    with_outliers(policy, model_type in KEEP_DIFFERENCES)
    passed = list(scales.watch(names.items()))
    assert [name for name, _ in passed] == list(names)
    seen, found = largest_seen(policy, monkeypatch), scales.scales()
    assert len(seen) == len(found) == 2
    for index, layer in enumerate(seen):
        for most, scale in zip(layer, found[index], strict=True):
            assert math.log2(scale).is_integer()
            assert most <= scale * LARGEST < 64 * most


def test_a_layer_is_bounded_before_the_next_comes() -> None:
    """A sharded layer's tensors are empty by then."""
    shapes: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj": (4, 8),
        "self_attn.k_proj": (2, 8),
        "self_attn.v_proj": (2, 8),
    }
    shapes["input_layernorm"] = (8,)
    layers = {f"model.layers.{i}.{name}.weight": shape for i in range(2) for name, shape in shapes.items()}
    scales = CacheScales(layers)

    def stream() -> Any:
        for index in range(2):
            tensors = {name: torch.ones(shape) for name, shape in layers.items() if f".{index}." in name}
            yield from tensors.items()
            for tensor in tensors.values():
                tensor.data = torch.empty(0)

    assert len(list(scales.watch(stream()))) == 8
    assert scales.scales() == {0: 2 * [2.0**-4] + [2.0**-5], 1: 2 * [2.0**-4] + [2.0**-5]}  # of 16 and 8


@pytest.mark.vllm
def test_policies_whose_values_pass_no_norm_or_an_unknown_one_are_refused(tmp_path: Path) -> None:
    for model_type, lacks in (("olmo2", "no input_layernorm"), ("phi3", "no q_proj, no k_proj, no v_proj")):
        shapes = policy_shapes(save_architecture(model_type, tmp_path / model_type))
        with pytest.raises(ValueError, match=rf"takes its scales from .* policy's have {lacks}; set 'auto'"):
            Quantization(None, kv_cache="fp8").check(shapes)
    shapes = policy_shapes(save_architecture("phi", tmp_path / "phi", qk_layernorm=True))
    with pytest.raises(ValueError, match=r"have an unknown k_layernorm.bias, .*; set 'auto'"):
        Quantization(None, kv_cache="fp8").check(shapes)


@pytest.mark.parametrize(("model_type", "norm"), [("gemma3n_text", "v_norm"), ("llama4_text", "qk_norm")])
def test_a_norm_in_attention_without_weights_is_refused(model_type: str, norm: str, tmp_path: Path) -> None:
    from transformers import AutoConfig

    AutoConfig.for_model(model_type, num_hidden_layers=2, num_kv_shared_layers=0).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=rf"does not know what {norm} of `policy` .* do; set 'auto'"):
        norm_offset(str(tmp_path))


def mean_logp(engine: VLLMEngine, policy: nn.Module) -> float:
    """Return the mean absolute difference of written tokens' log-probs from the policy's."""
    differences = []
    requests = [Request(id=i, prompt_ids=prompt) for i, prompt in enumerate(PROMPTS * 4)]
    for response in engine.generate(requests, Sampling(max_tokens=24), seed=0):
        prompt = requests[response.request_id].prompt_ids
        with torch.no_grad():
            logits = policy(input_ids=torch.tensor([[*prompt, *response.token_ids]])).logits[0, len(prompt) - 1 : -1]
        logps = logits.float().log_softmax(-1).gather(1, torch.tensor(list(response.token_ids))[:, None])[:, 0]
        differences += (logps - torch.tensor(list(response.logps))).abs().tolist()
    return fmean(differences)


@pytest.mark.vllm
@pytest.mark.skipif(
    not (torch.cuda.is_available() or torch.cpu._is_avx512_supported()), reason="needs AVX-512 for keys in fp8"
)
@pytest.mark.parametrize("enforce_eager", [True, pytest.param(False, marks=pytest.mark.gpu)], ids=["eager", "graphs"])
def test_an_engine_with_an_8_bit_cache_follows_values_beyond_the_type_and_back(
    enforce_eager: bool, tmp_path: Path
) -> None:
    path = str(save_policy(tmp_path, num_hidden_layers=2, initializer_range=0.1))
    plain, large = load_policy(path).bfloat16(), load_policy(path).bfloat16()
    with torch.no_grad():
        for layer in range(2):  # values a thousandfold, whose projection takes it back
            large.get_parameter(f"model.layers.{layer}.self_attn.v_proj.weight").mul_(2.0**11)
            large.get_parameter(f"model.layers.{layer}.self_attn.o_proj.weight").mul_(2.0**-11)
    quantization = Quantization(None, kv_cache="fp8")
    with engine_of(path, None, dtype="bfloat16", quantization=quantization, enforce_eager=enforce_eager) as engine:
        layer = engine.inspect().model_runner.get_model().get_submodule("model.layers.1.self_attn.attn")
        assert engine.compute_dtype == "fp8"
        addresses = [getattr(layer, f"_{part}_scale").data_ptr() for part in "qkv"]
        found = []
        for version, policy in enumerate((plain, large, plain)):
            engine.update_weights(PolicyWeights(policy), version)
            found.append((float(layer._v_scale), mean_logp(engine, policy)))
        assert addresses == [getattr(layer, f"_{part}_scale").data_ptr() for part in "qkv"]
    (small, error), (large_scale, large_error), again = found
    assert large_scale == 2.0**11 * small
    assert 0 < error < 0.1
    assert large_error == pytest.approx(error, rel=0.05)
    assert again == (small, error)
