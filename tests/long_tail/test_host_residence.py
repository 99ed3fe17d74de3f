"""A drafter that is on its device only while it is used."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.drafters.one_weight import OneWeight, make_buffer, steps, weight
from tlt_lightning.long_tail.host_residence import HostResidence
from tlt_lightning.long_tail.publishing import DrafterPublisher
from tlt_lightning.long_tail.trainer import DrafterTrainer


def run(offload: bool) -> tuple[list[float], dict[str, Any], list[int]]:
    """Train, publish and diverge; the weights, the optimizer's state, and where the weights lay between and within."""
    drafter = OneWeight(0.1)
    trainer = DrafterTrainer(
        drafter,  # type: ignore[arg-type]
        make_buffer(),
        pack_tokens=128,
        device=torch.device("cpu"),
        num_workers=2,
        sum_over_ranks=lambda tensor: tensor,
        offload=offload,
    )
    publisher, places = DrafterPublisher(trainer), []
    learn = drafter.loss

    def loss(batch: Any, **options: Any) -> Any:
        places.append(drafter.fc.data_ptr())
        return learn(batch, **options)

    drafter.loss = loss  # type: ignore[method-assign]
    trainer.begin(0)
    for _ in range(3):
        trainer.train(steps(3))
        trainer.average()
        publisher.publish_if_better()
        places.append(drafter.fc.data_ptr())
    return weight(trainer), trainer.optimizer.state_dict()["state"], places


def test_what_is_moved_learns_and_is_published_bit_for_bit_as_what_stays() -> None:
    (mine, state, moved), (theirs, expected, stayed) = run(offload=True), run(offload=False)
    assert mine == theirs
    for name, value in expected[0].items():
        assert torch.equal(state[0][name], value)
    assert len(set(stayed)) == 1
    home = moved[3]  # after the first stretch and its decision
    assert moved[7] == moved[11] == home
    assert home not in moved[4:7] + moved[8:11]


def test_parameters_stay_the_objects_that_they_are_and_ties_hold() -> None:
    layers = torch.nn.ModuleDict({"embedding": torch.nn.Embedding(5, 3), "head": torch.nn.Linear(3, 5, bias=False)})
    layers["head"].weight = layers["embedding"].weight
    before, value = layers["head"].weight, layers["head"].weight.detach().clone()
    optimizer = torch.optim.AdamW(layers.parameters(), lr=0.1)
    residence = HostResidence(layers, torch.device("cpu"))
    with residence.on_device(optimizer), residence.on_device(optimizer):
        layers["head"](layers["embedding"](torch.arange(5))).sum().backward()
        optimizer.step()
    assert layers["head"].weight is layers["embedding"].weight is before
    assert before.grad is None
    assert not torch.equal(before, value)
    assert {name for state in optimizer.state.values() for name in state} == {"step", "exp_avg", "exp_avg_sq"}


class Crowded(torch.nn.Parameter):
    """Comes to no device that other programs have filled."""

    is_full = False

    def to(self, *args: Any, **options: Any) -> Tensor:
        if self.is_full:
            raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB.")
        return super().to(*args, **options)


def test_a_window_without_memory_for_the_drafter_is_left_out_counted_and_ends_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    drafter = OneWeight(0.1)
    drafter.policy_rows = rows = Crowded(torch.zeros(2), requires_grad=False)
    trainer = DrafterTrainer(drafter, make_buffer(), pack_tokens=128, device=torch.device("cpu"), offload=True)  # type: ignore[arg-type]
    trainer.begin(0)
    before, home, rows.is_full = weight(trainer), drafter.fc.data_ptr(), True
    stretch = trainer.train(steps(3))
    assert (stretch.losses, stretch.num_out_of_memory) == ([], 1)
    assert "no memory to come to the device, and stays away for now: Tried to allocate" in caplog.text
    assert (weight(trainer), drafter.fc.data_ptr(), trainer.num_pending) == (before, home, 0)
    rows.is_full = False
    assert len(trainer.train(steps(3)).losses) == 3
    assert weight(trainer) != before
    publisher, rows.is_full = DrafterPublisher(trainer), True
    assert publisher.publish_if_better() is None
    assert trainer.num_pending == 3  # the decision waits
    rows.is_full = False
    assert publisher.publish_if_better() is not None


@pytest.mark.gpu
def test_nothing_of_it_is_left_on_the_device() -> None:
    device = torch.device("cuda")
    module = torch.nn.Linear(1024, 1024)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    torch.nn.Linear(1024, 1024, device=device)(torch.ones(1, 1024, device=device)).sum().backward()  # cuBLAS' workspace
    residence, before = HostResidence(module, device), torch.cuda.memory_allocated()
    values: list[Tensor] = []
    for _ in range(2):
        with residence.on_device(optimizer):
            assert module.weight.is_cuda
            module(torch.ones(1, 1024, device=device)).sum().backward()
            optimizer.step()
            values.append(module.weight.detach().cpu())
        assert torch.cuda.memory_allocated() == before
        assert torch.equal(module.weight, values[-1])
        assert module.weight.is_pinned()
    assert not torch.equal(*values)
