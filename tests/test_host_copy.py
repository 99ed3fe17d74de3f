import pytest
import torch

from tlt_lightning.host_copy import HostCopy, to_host


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


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_copies_of_a_gpu_are_complete_when_read_and_page_locked() -> None:
    copy, weight = HostCopy(), torch.full((1 << 24,), 1.0, device="cuda")
    copy.fill([("weight", weight)])
    weight.zero_()
    assert copy.tensors["weight"].is_pinned()
    assert copy.tensors["weight"].min() == 1
    copy.fill([("weight", torch.zeros(1 << 24))])  # of a checkpoint
    assert copy.tensors["weight"].is_pinned()
    assert copy.tensors["weight"].max() == 0


def test_a_copy_on_the_host_is_no_view() -> None:
    tensor = torch.arange(6.0).view(3, 2)
    copy = to_host(tensor[:2])
    tensor.zero_()
    assert copy.tolist() == [[0, 1], [2, 3]]
    assert copy.untyped_storage().nbytes() == copy.nbytes


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_copy_of_a_gpus_tensor_waits_for_it_and_is_not_page_locked() -> None:
    tensor = torch.randn(4096, 4096, device="cuda")
    for _ in range(20):
        tensor = tensor @ tensor / 64
    copy = to_host(tensor[:, :100])
    assert not copy.is_pinned()
    torch.testing.assert_close(copy, tensor[:, :100].cpu())
