import os
from pathlib import Path

import pytest
import torch

from tlt_lightning.host_copy import HostCopy


def test_it_holds_what_was_there_and_writes_to_the_same_memory_again() -> None:
    copy, weight = HostCopy(), torch.ones(3)
    copy.fill([("weight", weight), ("other", weight)])
    place = copy.tensors["weight"].data_ptr()
    weight.zero_()
    assert copy.tensors["weight"].tolist() == [1, 1, 1]
    copy.fill([("weight", weight)])
    assert {name: tensor.tolist() for name, tensor in copy.tensors.items()} == {"weight": [0, 0, 0]}
    assert copy.tensors["weight"].data_ptr() == place


@pytest.mark.parametrize("tensor", [torch.ones(2), torch.ones(3, dtype=torch.float64)])
def test_another_shape_or_type_gets_memory_of_its_own(tensor: torch.Tensor) -> None:
    copy = HostCopy()
    copy.fill([("weight", torch.zeros(3))])
    copy.fill([("weight", tensor)])
    torch.testing.assert_close(copy.tensors["weight"], tensor, rtol=0, atol=0)


def test_a_copy_of_nested_state_keeps_what_was_there_and_tied_weights_tied() -> None:
    weight, history = torch.ones(3), {1: [0.5]}
    state = {"model": {"embed": weight, "head": weight, "part": weight[1:]}, "history": history, "empty": []}
    host = HostCopy()
    copy = host.fill_state(state)
    weight.zero_()
    history[1].append(0.6)
    assert copy["history"] == {1: [0.5]}
    assert copy["empty"] == []
    assert {name: tensor.tolist() for name, tensor in copy["model"].items()} == {
        "embed": [1, 1, 1],
        "head": [1, 1, 1],
        "part": [1, 1],
    }
    assert copy["model"]["embed"] is copy["model"]["head"]
    assert host.fill_state(state)["model"]["embed"].data_ptr() == copy["model"]["embed"].data_ptr()


def test_a_tensor_of_a_class_of_its_own_is_copied_as_such() -> None:
    class Quantised(torch.Tensor):
        """A tensor with a class of its own."""

    tensor = torch.ones(2).as_subclass(Quantised)
    copy = HostCopy().fill_state([tensor, torch.eye(2).to_sparse()])
    tensor.zero_()
    assert isinstance(copy[0], Quantised)
    assert copy[0].tolist() == [1, 1]
    assert copy[1].to_dense().tolist() == [[1, 0], [0, 1]]


@pytest.mark.gpu
def test_copies_of_a_gpu_are_complete_when_read_and_page_locked() -> None:
    copy, weight = HostCopy(), torch.full((1 << 24,), 1.0, device="cuda")
    copy.fill([("weight", weight)])
    weight.zero_()
    assert copy.tensors["weight"].is_pinned()
    assert copy.tensors["weight"].min() == 1
    copy.fill([("weight", torch.zeros(1 << 24))])  # of a checkpoint
    assert copy.tensors["weight"].is_pinned()
    assert copy.tensors["weight"].max() == 0


@pytest.mark.gpu
def test_page_locked_memory_is_as_large_as_its_tensor_and_follows_the_gpu_after_a_fork() -> None:
    copy, weight = HostCopy(), torch.zeros((1 << 29) + 5, dtype=torch.uint8, device="cuda")
    before = _resident_mib()
    copy.fill([("weight", weight), ("empty", weight[:0]), ("half", torch.ones(3, dtype=torch.bfloat16, device="cuda"))])
    assert copy.tensors["half"].tolist() == [1, 1, 1]
    assert copy.tensors["empty"].numel() == 0
    assert 500 < _resident_mib() - before < 700  # PyTorch's own would have 1,024
    held, let_go = os.pipe()
    if (child := os.fork()) == 0:
        os.close(let_go)
        os.read(held, 1)
        os._exit(0)
    copy.tensors["weight"].fill_(1)  # this process writes to its pages while the child holds what it was given
    copy.fill([("weight", weight + 2)])
    assert copy.tensors["weight"].min() == copy.tensors["weight"].max() == 2
    os.close(let_go)
    os.waitpid(child, 0)
    os.close(held)
    copy.fill([])
    assert _resident_mib() - before < 200


def _resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20
