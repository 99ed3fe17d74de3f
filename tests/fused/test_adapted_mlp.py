"""MLPs with adapters against those of transformers with PEFT's."""

import copy
import os
import subprocess
import sys

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.models.llama.modeling_llama import LlamaConfig, LlamaMLP

from tests.fused.test_adapter import passes
from tlt_lightning.fused import adapted_mlp
from tlt_lightning.fused.adapted_mlp import fuse_adapted_mlps
from tlt_lightning.fused.adapter import fuse_adapters
from tlt_lightning.fused.layers import fuse_layers

KERNELS_AGAINST_OPERATIONS = """
import sys
import torch
from torch.nn.functional import silu
from tlt_lightning.fused import kernels

device, dtype = sys.argv[1], getattr(torch, sys.argv[2])
torch.manual_seed(0)
for rows, width, rank in ((70, 200, 3), (64, 128, 32), (130, 72, 128)):
    gate, up, grad = torch.randn(3, rows, width, device=device).to(dtype)
    inner = torch.randn(3, rows, rank, device=device).to(dtype)
    factors = (torch.randn(3, width, rank, device=device) / rank**0.5).to(dtype)
    whole = [each.double().requires_grad_() for each in (gate, up)]
    sums = [x + y.double() @ b.double().T for x, y, b in zip(whole, inner[:2], factors[:2])]
    expected = silu(sums[0]) * sums[1]
    expected.backward(grad.double() + inner[2].double() @ factors[2].double().T)
    a_down = factors[2].T.contiguous()
    results = [kernels.gated(gate, up, *inner[:2], *factors[:2])]
    results += kernels.gated_gradient(grad, gate, up, inner[2], *inner[:2], a_down, *factors[:2])
    for mine, other in zip(results, (expected, *(each.grad for each in whole))):
        assert mine.dtype == dtype
        error = (mine - other).norm() / other.norm()
        assert error < {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype], float(error)
"""


def mlps(bias: bool = False, **options: object) -> list[nn.Module]:
    """PEFT's model of an MLP, the same with its layers fused, and with the whole of it."""
    torch.manual_seed(0)
    config = LlamaConfig(hidden_size=12, num_attention_heads=2, intermediate_size=20, mlp_bias=bias)
    lora = LoraConfig(**{"r": 3, "lora_alpha": 5, "target_modules": "all-linear", **options})
    theirs = get_peft_model(nn.Sequential(LlamaMLP(config)).double(), lora)
    for name, parameter in theirs.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn_like(parameter).to(torch.float64) / 3
    layers, whole = copy.deepcopy(theirs), copy.deepcopy(theirs)
    for model in (layers, whole):
        fuse_layers(model)
        fuse_adapters(model)
    fuse_adapted_mlps(whole)
    return [theirs, layers, whole]


@pytest.fixture
def number_fused(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts the MLPs that were computed here."""
    calls: list[int] = []
    apply = adapted_mlp._AdaptedMLP.apply

    def counted(*args: object) -> Tensor:
        calls.append(1)
        return apply(*args)

    monkeypatch.setattr(adapted_mlp._AdaptedMLP, "apply", counted)
    return calls


def test_outputs_and_gradients_are_those_of_peft_and_transformers(number_fused: list[int]) -> None:
    theirs, _, ours = mlps(alpha_pattern={"up_proj": 7})
    x = torch.randn(2, 7, 12, dtype=torch.float64)
    mine, expected = passes(ours, x), passes(theirs, x)
    assert len(mine) == 2 + 6
    for pair in zip(mine, expected, strict=True):
        torch.testing.assert_close(*pair, rtol=1e-10, atol=1e-10)
    assert len(number_fused) == 1


def test_under_autocast_they_are_theirs_as_far_as_bfloat16_goes(number_fused: list[int]) -> None:
    theirs, _, ours = (each.float() for each in mlps())
    x = torch.randn(64, 12)
    with torch.autocast("cpu", torch.bfloat16):
        results = zip(passes(ours, x), passes(theirs, x), strict=True)
    for mine, expected in results:
        assert mine.dtype == expected.dtype
        assert (mine - expected).float().norm() < 0.02 * expected.float().norm()
    assert len(number_fused) == 1


def test_no_more_is_kept_than_of_the_layers_one_by_one() -> None:
    kept = []
    for model in mlps()[1:]:
        saved: dict[int, int] = {}

        def note(tensor: Tensor, saved: dict[int, int] = saved) -> Tensor:
            saved[tensor.untyped_storage()._cdata] = tensor.nbytes
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            model(torch.randn(7, 12, dtype=torch.float64, requires_grad=True))
        kept.append(sum(saved.values()))
    assert kept[1] == kept[0]


@pytest.mark.parametrize(
    "options",
    [
        {"bias": True},
        {"rank_pattern": {"up_proj": 2}},
        {"use_dora": True},
        {"target_modules": ["gate_proj", "up_proj"]},
    ],
    ids=["bias", "ranks", "dora", "not all adapted"],
)
def test_other_mlps_are_computed_layer_by_layer(options: dict[str, object], number_fused: list[int]) -> None:
    theirs, _, ours = mlps(**options)
    x = torch.randn(7, 12, dtype=torch.float64)
    for pair in zip(passes(ours, x), passes(theirs, x), strict=True):
        torch.testing.assert_close(*pair, rtol=1e-10, atol=1e-10)
    assert number_fused == []


def test_without_adapters_or_its_activation_an_mlp_is_transformers(number_fused: list[int]) -> None:
    theirs, _, ours = mlps()
    x = torch.randn(7, 12, dtype=torch.float64)
    with ours.disable_adapter(), theirs.disable_adapter():
        torch.testing.assert_close(ours(x), theirs(x), rtol=1e-10, atol=1e-10)
    for model in (ours, theirs):
        model.base_model.model[0].act_fn = nn.GELU()
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-10, atol=1e-10)
    assert number_fused == []


def run_kernels(device: str, dtype: str, **variables: str) -> None:
    command = [sys.executable, "-c", KERNELS_AGAINST_OPERATIONS, device, dtype]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **variables})


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_kernels_compute_what_operations_do(dtype: str) -> None:
    pytest.importorskip("triton")
    run_kernels("cpu", dtype, TRITON_INTERPRET="1")  # whose bfloat16 is none


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_compiled_kernels_compute_what_operations_do(dtype: str) -> None:
    run_kernels("cuda", dtype)


@pytest.mark.gpu
def test_a_gpu_computes_an_mlp_by_kernels_as_it_does_without(monkeypatch: pytest.MonkeyPatch) -> None:
    from tlt_lightning.fused import kernels

    model, x, results = mlps()[2].bfloat16().cuda(), torch.randn(2, 50, 12).bfloat16().cuda(), []
    for is_tried in (True, False):
        monkeypatch.setattr(kernels, "work", kernels.work if is_tried else lambda: False)
        assert kernels.work() == is_tried
        results.append(passes(model, x))
    for mine, expected in zip(*results, strict=True):
        assert (mine - expected).float().norm() < 0.02 * expected.float().norm()


def test_kernels_that_cannot_be_compiled_are_left_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kernels = pytest.importorskip("tlt_lightning.fused.kernels", exc_type=ImportError)

    def broken(*_: Tensor) -> Tensor:
        raise RuntimeError("Failed to find C compiler.")

    monkeypatch.setattr(kernels, "gated", broken)
    kernels.work.cache_clear()
    with FakeTensorMode():
        assert not kernels.work()
    kernels.work.cache_clear()
    assert "adapted MLPs take longer: Failed to find C compiler." in caplog.text
