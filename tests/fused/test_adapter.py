"""Adapted linear layers against PEFT's own."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import Linear
from torch import Tensor, nn

from tests.test_policy import make_batch
from tlt_lightning.adapters import LoRA
from tlt_lightning.fused import adapter
from tlt_lightning.fused.adapter import fuse_adapters
from tlt_lightning.policy import PolicyWeights, load_policy, response_logps


def pair_of(**options: object) -> tuple[nn.Module, nn.Module]:
    """PEFT's model of two linear layers, the second with a bias, and the same one fused."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(12, 20, bias=False), nn.GELU(), nn.Linear(20, 6)).double()
    config = LoraConfig(**{"r": 3, "lora_alpha": 5, "target_modules": ["0", "2"], **options})
    theirs = get_peft_model(network, config)
    for name, parameter in theirs.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn_like(parameter).to(torch.float64) / 3
    ours = copy.deepcopy(theirs)
    fuse_adapters(ours)
    return theirs, ours


def passes(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Output of a pass, and gradients of the input and of all trained weights."""
    model.zero_grad()
    x = x.clone().requires_grad_()
    y = model(x)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.fixture
def number_fused(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts the layers that were computed here."""
    calls: list[int] = []
    apply = adapter._AdaptedLinear.apply

    def counted(*args: object) -> Tensor:
        calls.append(1)
        return apply(*args)

    monkeypatch.setattr(adapter._AdaptedLinear, "apply", counted)
    return calls


@pytest.mark.parametrize("options", [{}, {"use_rslora": True}], ids=["plain", "rslora"])
def test_outputs_and_gradients_are_those_of_peft(options: dict[str, object], number_fused: list[int]) -> None:
    theirs, ours = pair_of(**options)
    x = torch.randn(2, 7, 12, dtype=torch.float64)
    for mine, expected in zip(passes(ours, x), passes(theirs, x), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-10, atol=1e-10)
    assert len(number_fused) == 2
    assert len(passes(ours, x)) == 2 + 4
    assert passes(ours, x[:, :0])[0].shape == (2, 0, 6)  # of an expert that nobody chose


def test_under_autocast_they_are_those_of_peft_as_far_as_bfloat16_goes(number_fused: list[int]) -> None:
    theirs, ours = (each.float() for each in pair_of())
    x = torch.randn(64, 12)
    with torch.autocast("cpu", torch.bfloat16):
        results = zip(passes(ours, x), passes(theirs, x), strict=True)
    for mine, expected in results:
        assert mine.dtype == expected.dtype
        assert (mine - expected).float().norm() < 0.02 * expected.float().norm()
    assert len(number_fused) == 2


@pytest.mark.parametrize(
    "options",
    [{"use_dora": True}, {"lora_dropout": 0.5}, {"lora_bias": True}],
    ids=["dora", "dropout", "bias of B"],
)
def test_what_is_more_than_plain_adapters_is_left_to_peft(options: dict[str, object], number_fused: list[int]) -> None:
    theirs, ours = pair_of(**options)
    x = torch.randn(7, 12, dtype=torch.float64)
    torch.manual_seed(1)
    mine = ours(x)
    torch.manual_seed(1)
    assert torch.equal(mine, theirs(x))
    assert number_fused == []


def test_layers_that_are_merged_off_or_trained_are_left_to_peft(number_fused: list[int]) -> None:
    theirs, ours = pair_of()
    x = torch.randn(7, 12, dtype=torch.float64)
    with ours.disable_adapter(), theirs.disable_adapter():
        assert torch.equal(ours(x), theirs(x))
    for model in (ours, theirs):
        model.merge_adapter()
    assert torch.equal(ours(x), theirs(x))
    for model in (ours, theirs):
        model.unmerge_adapter()
        for layer in model.modules():
            if type(layer) is Linear:
                layer.base_layer.requires_grad_(True)
    results = passes(ours, x)
    assert len(results) == 2 + 4 + 3
    assert all(torch.equal(*pair) for pair in zip(results, passes(theirs, x), strict=True))
    assert number_fused == []


def test_peft_stays_as_it_is_but_for_the_layers_of_the_model() -> None:
    forward = Linear.forward
    theirs, ours = pair_of()
    assert Linear.forward is forward
    assert all("forward" not in vars(layer) for layer in theirs.modules())
    assert ours.state_dict().keys() == theirs.state_dict().keys()


def test_a_policy_learns_as_with_peft_alone(policy_path: str, number_fused: list[int]) -> None:
    def learned(*, is_fused: bool) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model = load_policy(policy_path, lora=LoRA(rank=4))
        for layer in model.modules() if not is_fused else ():
            vars(layer).pop("forward", None)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        for _ in range(5):
            (-response_logps(model, make_batch([3, 2], [4, 6]), chunk_size=64)[0].sum()).backward()
            optimizer.step()
            optimizer.zero_grad()
        return {name: weight.clone() for name, weight in PolicyWeights(model)}

    ours, theirs = learned(is_fused=True), learned(is_fused=False)
    assert len(number_fused) == 5 * 2 * 7
    before = dict(PolicyWeights(load_policy(policy_path)))
    assert any((theirs[name] - before[name]).abs().max() > 1e-2 for name in theirs)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
