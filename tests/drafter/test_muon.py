"""The optimizer of a new head: torch's Muon for matrices, its AdamW for vectors."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from tlt_lightning.drafter.muon import MuonWithAuxAdam
from tlt_lightning.training.memory.optimizer_state import training_bytes


def small_head() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8, bias=False), nn.LayerNorm(8, bias=False), nn.Linear(8, 3, bias=False))


def learn(head: nn.Module, *parts: torch.optim.Optimizer | LambdaLR, steps: int = 3, seed: int = 1) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        head.zero_grad()
        head(torch.randn(5, 6, generator=generator)).square().sum().backward()
        for part in parts:
            part.step()


def weights(head: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach() for parameter in head.parameters()]


def equal(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(weights(one), weights(other), strict=True))


@pytest.mark.parametrize("in_groups", [False, True])
def test_matrices_move_by_muon_and_vectors_by_adam(in_groups: bool) -> None:
    head, apart = small_head(), small_head()
    given = [{"params": list(head.parameters())}] if in_groups else head.parameters()
    learn(head, MuonWithAuxAdam(given, lr=0.05, momentum=0.7, vector_lr=1e-2))
    first, norm, last = apart.parameters()
    learn(
        apart,
        torch.optim.Muon([first, last], lr=0.05, momentum=0.7, weight_decay=0.0),
        torch.optim.AdamW([norm], lr=1e-2, weight_decay=0.0),
    )
    assert equal(head, apart)
    assert not equal(head, small_head())


def test_a_step_has_the_rate_as_its_largest_singular_value() -> None:
    head = nn.Linear(40, 30, bias=False)
    before = head.weight.detach().clone()
    head(torch.randn(64, 40)).square().sum().backward()
    MuonWithAuxAdam(head.parameters(), lr=0.05).step()
    singular = torch.linalg.svdvals(head.weight.detach() - before)
    assert 0.05 * 0.5 < singular.min() < singular.max() < 0.05 * 1.5


def test_a_schedule_moves_the_rates_of_both_parts() -> None:
    head, slow = small_head(), small_head()
    optimizer = MuonWithAuxAdam(head.parameters(), lr=0.05, vector_lr=1e-2)
    schedule = LambdaLR(optimizer, lambda step: 0.5)
    learn(head, optimizer, schedule)
    learn(slow, MuonWithAuxAdam(slow.parameters(), lr=0.025, vector_lr=0.5e-2))
    assert equal(head, slow)


def test_a_checkpoint_is_gone_on_from_exactly() -> None:
    head, resumed = small_head(), small_head()
    optimizer = MuonWithAuxAdam(head.parameters(), lr=0.05)
    learn(head, optimizer)
    resumed.load_state_dict(head.state_dict())
    other = MuonWithAuxAdam(resumed.parameters(), lr=0.01)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert [group["lr"] for group in other.param_groups] == [0.05, 3e-3]
    learn(head, optimizer, seed=2)
    learn(resumed, other, seed=2)
    assert equal(head, resumed)


@pytest.mark.parametrize("copy_of", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))])
def test_a_copy_learns_on_as_its_original_does(copy_of: Callable[[Any], Any]) -> None:
    head = small_head()
    optimizer = MuonWithAuxAdam(head.parameters(), lr=0.05)
    learn(head, optimizer)
    copied, other = copy_of((head, optimizer))
    other.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"] = 0.01
    learn(head, optimizer, seed=2)
    learn(copied, other, seed=2)
    assert equal(head, copied)


def test_a_checkpoint_of_a_torch_with_other_settings_is_gone_on_from() -> None:
    head = small_head()
    optimizer = MuonWithAuxAdam(head.parameters())
    learn(head, optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    del saved["param_groups"][0]["adjust_lr_fn"]
    saved["param_groups"][0]["use_addmm"] = False
    optimizer.load_state_dict(saved)
    before = [weight.clone() for weight in weights(head)]
    learn(head, optimizer, steps=1)
    assert not any(map(torch.equal, before, weights(head)))


def test_a_matrix_that_is_added_later_is_trained_too() -> None:
    head, last = small_head(), nn.Linear(8, 3, bias=False)
    optimizer = MuonWithAuxAdam(list(head.parameters())[:2])
    head[2], before = last, last.weight.detach().clone()
    optimizer.add_param_group({"params": [last.weight]})
    learn(head, optimizer, steps=1)
    assert not torch.equal(last.weight, before)


def test_a_matrix_has_half_of_adams_state() -> None:
    head = nn.Linear(64, 32, bias=False)
    assert training_bytes(head, MuonWithAuxAdam) == 64 * 32 * (4 + 4 + 4)
    assert training_bytes(head, torch.optim.AdamW) == 64 * 32 * (4 + 4 + 8)
    assert training_bytes(head.requires_grad_(False), torch.optim.AdamW) == 64 * 32 * 4


@pytest.mark.parametrize(("name", "value"), [("lr", 0.0), ("momentum", 1.0), ("vector_lr", -1.0)])
def test_rates_that_cannot_be_are_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"`{name}`"):
        MuonWithAuxAdam(small_head().parameters(), **{name: value})


def test_groups_with_settings_of_their_own_are_refused() -> None:
    head = small_head()
    with pytest.raises(ValueError, match=r"`params` has groups with lr of their own.*give groups of `params` alone"):
        MuonWithAuxAdam([{"params": head[0].parameters()}, {"params": head[1].parameters(), "lr": 0.1}])
