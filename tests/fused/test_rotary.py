"""Rotary embeddings against transformers' own."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from tests.support.architectures import save_architecture
from tlt_lightning.fused.rotary import fuse_rotary, rotate
from tlt_lightning.policy import load_shapes


def operands(batch: int = 2, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Queries, keys, cosines and sines; those of a half are no copies of the other's, as the function permits."""
    torch.manual_seed(0)
    projected = [torch.randn(2, 5, heads, 8).transpose(1, 2) for heads in (6, 2)]
    return [each.to(dtype) for each in (*projected, *torch.randn(2, batch, 5, 8))]


def passes(function: Callable[..., Sequence[Tensor]], operands: list[Tensor]) -> list[Tensor]:
    """Turned queries and keys, and gradients of both."""
    query, key, cos, sin = operands
    query, key = query.clone().requires_grad_(), key.clone().requires_grad_()
    turned = function(query, key, cos, sin)
    sum((each.float().square() + each.float()).sum() for each in turned).backward()
    return [*(each.detach() for each in turned), query.grad, key.grad]


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_outputs_and_gradients_are_those_of_transformers(batch: int, dtype: torch.dtype) -> None:
    given = operands(batch, dtype)
    for mine, expected in zip(passes(rotate, given), passes(apply_rotary_pos_emb, given), strict=True):
        assert mine.dtype == dtype
        torch.testing.assert_close(mine, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("angles", [torch.float32, torch.bfloat16], ids=str)
def test_under_autocast_they_are_what_attention_would_make_of_transformers(angles: torch.dtype) -> None:
    query, key, cos, sin = operands()
    given = [query.bfloat16(), key.bfloat16(), cos.to(angles), sin.to(angles)]
    with torch.autocast("cpu", torch.bfloat16):
        mine = passes(rotate, given)
    expected = passes(lambda *args: [each.bfloat16() for each in apply_rotary_pos_emb(*args)], given)
    for number, (ours, theirs) in enumerate(zip(mine, expected, strict=True)):
        assert ours.dtype == torch.bfloat16
        assert torch.equal(ours, theirs) or number >= 2
        assert (ours - theirs).float().norm() < 0.02 * theirs.float().norm()


def test_angles_are_all_that_is_kept() -> None:
    query, key, cos, sin = operands(batch=1)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        rotate(query.requires_grad_(), key, cos, sin)
    assert {each.data_ptr() for each in kept} == {cos.data_ptr(), sin.data_ptr()}


def test_layers_change_and_classes_stay(tmp_path: Path) -> None:
    model = load_shapes(save_architecture("qwen2", tmp_path))
    layers = [layer.self_attn for layer in model.model.layers]
    forward = type(layers[0]).forward
    for layer in layers:
        del layer.forward
    fuse_rotary(model)
    assert all(layer.forward.__func__ is not forward for layer in layers)
    assert type(layers[0]).forward is forward
    assert forward.__globals__["apply_rotary_pos_emb"] is not rotate


def test_layers_that_turn_the_other_way_stay_as_they_are() -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = AutoConfig.for_model("nanochat", vocab_size=32, num_key_value_heads=2, head_dim=8, **shape)
    model, ids = AutoModelForCausalLM.from_config(config), torch.arange(8)[None]
    own = model(input_ids=ids).logits
    fuse_rotary(model)
    assert torch.equal(model(input_ids=ids).logits, own)


class OfAnotherLayer(nn.Module):
    """Calls Llama's function from code that needs more than globals."""

    def forward(self, *given: Tensor, text: str = "") -> Sequence[Tensor]:
        assert super().extra_repr() == text
        return apply_rotary_pos_emb(*given)


class OfItself(nn.Module):
    """Has a method of the function's name."""

    def forward(self) -> int:
        return self.apply_rotary_pos_emb()

    def apply_rotary_pos_emb(self) -> int:
        return 3


def test_code_of_any_layer_runs_on() -> None:
    layer, method, given = OfAnotherLayer(), OfItself(), operands()
    expected = layer(*given)
    for each in (layer, method):
        fuse_rotary(each)
    torch.testing.assert_close(layer(*given), expected)
    assert layer.forward.__globals__["apply_rotary_pos_emb"] is rotate
    assert method() == 3
