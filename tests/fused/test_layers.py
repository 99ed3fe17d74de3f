"""Norms and gated activations against transformers' own."""

import copy

import pytest
import torch
from torch import Tensor, nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaConfig, LlamaMLP, LlamaRMSNorm

from tests.support.architectures import save_architecture
from tests.test_policy import make_batch
from tlt_lightning.fused.layers import fuse_layers
from tlt_lightning.policy import load_policy, load_shapes, response_logps


def fused_in(model: nn.Module) -> set[str]:
    return {type(layer).__name__ for layer in model.modules() if "forward" in vars(layer)}


def pair_of(name: str) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    config = LlamaConfig(hidden_size=24, num_attention_heads=2, intermediate_size=40, mlp_bias=True)
    theirs = LlamaRMSNorm(24, eps=1e-3) if name == "norm" else LlamaMLP(config)
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.5)
    ours = copy.deepcopy(theirs)
    fuse_layers(ours)
    assert fused_in(ours)
    return theirs, ours


def passes(layer: nn.Module, x: Tensor, *, is_autocast: bool = False) -> list[Tensor]:
    """Output of a pass, and gradients of the input and of the weights."""
    x = x.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
        y = layer(x)
    (y.float().square() + y.float()).sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in layer.parameters() if p.requires_grad)]


@pytest.mark.parametrize("name", ["norm", "mlp"])
@pytest.mark.parametrize("shape", [(2, 7, 24), (5, 24)], ids=str)
def test_outputs_are_those_of_transformers_and_so_are_gradients(name: str, shape: tuple[int, ...]) -> None:
    theirs, ours = pair_of(name)
    x = torch.randn(shape)
    mine, expected = passes(ours, x), passes(theirs, x)
    assert torch.equal(mine[0], expected[0])
    for pair in zip(mine, expected, strict=True):
        torch.testing.assert_close(*pair, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["norm", "mlp"])
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("inputs", [torch.float32, torch.bfloat16], ids=str)
def test_under_autocast_outputs_are_what_the_next_linear_layer_would_make_of_transformers(
    name: str, weights: torch.dtype, inputs: torch.dtype
) -> None:
    theirs, ours = (each.to(weights) for each in pair_of(name))
    x = torch.randn(7, 24).to(inputs)
    (mine, *gradients), (output, *expected) = (passes(each, x, is_autocast=True) for each in (ours, theirs))
    assert torch.equal(mine, output.bfloat16())
    for gradient, other in zip(gradients, expected, strict=True):
        assert gradient.dtype == other.dtype
        assert (gradient - other).float().norm() < 0.02 * other.float().norm()


def test_under_autocast_linear_layers_that_read_a_norm_keep_no_copies_of_their_own() -> None:
    norm, readers = pair_of("norm")[1], [nn.Linear(24, 8) for _ in range(3)]
    x, kept = torch.randn(7, 24, requires_grad=True), set()

    def note(tensor: Tensor) -> Tensor:
        if tensor.shape == (7, 24) and tensor.dtype == torch.bfloat16:
            kept.add(tensor.untyped_storage().data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor), torch.autocast("cpu", torch.bfloat16):
        y = norm(x)
        outputs = [reader(y) for reader in readers]
    assert len(outputs) == 3
    assert len(kept) == 1


def test_what_a_pass_keeps_is_its_input() -> None:
    kept: list[Tensor] = []
    norm, x = pair_of("norm")[1].bfloat16(), torch.randn(7, 24, dtype=torch.bfloat16)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        norm(x.requires_grad_())
    assert sum(each.nbytes for each in kept) == x.nbytes + norm.weight.nbytes + 7 * 4


def test_layers_of_another_function_stay_as_they_are() -> None:
    class Own(LlamaRMSNorm):
        def forward(self, hidden_states: Tensor) -> Tensor:
            return 2 * super().forward(hidden_states)

    gated = LlamaMLP(LlamaConfig(hidden_size=24, num_attention_heads=2, intermediate_size=40, hidden_act="gelu"))
    others = nn.ModuleList([Own(8), GemmaRMSNorm(8), nn.RMSNorm(8), gated])
    fuse_layers(others)
    assert fused_in(others) == set()


@pytest.mark.parametrize(
    ("model_type", "names"),
    [
        ("qwen2", {"Qwen2RMSNorm", "Qwen2MLP"}),
        ("qwen3", {"Qwen3RMSNorm", "Qwen3MLP"}),
        ("llama", {"LlamaRMSNorm", "LlamaMLP"}),
        ("smollm3", {"SmolLM3RMSNorm", "SmolLM3MLP"}),
        ("qwen3_moe", {"Qwen3MoeRMSNorm"}),
        ("gemma3_text", set()),
        ("phi3", {"Phi3RMSNorm"}),
        ("gpt2", set()),
    ],
)
def test_families_whose_layers_are_llamas_are_fused(model_type: str, names: set[str], tmp_path) -> None:
    path = save_architecture(model_type, tmp_path)
    model = load_policy(path)
    assert fused_in(model) == fused_in(load_shapes(path)) == names
    layers = [layer for layer in model.modules() if type(layer).__name__ in names]
    batch = make_batch([3, 2], [4, 6])
    ours = response_logps(model, batch)[0]
    for layer in layers:
        del layer.forward
    torch.testing.assert_close(ours, response_logps(model, batch)[0], rtol=1e-6, atol=1e-6)
