"""Tensors on their way to a device, here to the host's own memory unless a GPU is asked for."""

import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tlt_lightning.engine.ray import staging
from tlt_lightning.engine.ray.staging import staged

CPU = torch.device("cpu")
TENSORS = [torch.randint(256, (size,), dtype=torch.uint8) for size in (140, 18, 8, 0, 800, 3)]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "PIECE_BYTES", 16)
    monkeypatch.setattr(staging, "AHEAD_BYTES", 256)


@pytest.mark.parametrize("num_threads", [1, 8])
@pytest.mark.parametrize("is_inference", [False, True])
@pytest.mark.parametrize("device", [CPU, pytest.param(torch.device("cuda"), marks=pytest.mark.gpu)])
def test_tensors_arrive_in_their_order_in_memory_of_their_own(
    monkeypatch: pytest.MonkeyPatch, num_threads: int, is_inference: bool, device: torch.device
) -> None:
    monkeypatch.setattr(staging, "NUM_THREADS", num_threads)
    with torch.inference_mode(is_inference):
        found = list(staged(TENSORS * 3, device))
    assert len(found) == 3 * len(TENSORS)
    for tensor, arrived in zip(TENSORS * 3, found, strict=True):
        assert arrived.device.type == device.type
        assert torch.equal(arrived.cpu(), tensor)
        assert arrived.data_ptr() != tensor.data_ptr() or not tensor.numel()


def test_few_bytes_are_ahead_of_who_asks_and_a_large_tensor_is_alone() -> None:
    sizes = [100, 100, 40, 300, 8, 256, 257, 1]
    taken: list[int] = []

    def source() -> Iterator[Tensor]:
        for size in sizes:
            yield torch.full((size,), len(taken), dtype=torch.uint8)
            taken.append(size)

    ahead = []
    for number, tensor in enumerate(staged(source(), CPU)):
        assert tensor.tolist() == [number] * sizes[number]
        ahead.append(taken[number + 1 :])
    assert ahead == [[100, 40], [40], [], [], [], [], [], []]


def test_threads_end_with_who_reads_and_with_what_goes_wrong() -> None:
    def source() -> Iterator[Tensor]:
        yield from TENSORS * 5
        raise OSError("the store is gone")

    reading = staged(source(), CPU)
    next(reading)
    assert any(thread.name.startswith("staging") for thread in threading.enumerate())
    del reading
    with pytest.raises(OSError, match="the store is gone"):
        list(staged(source(), CPU))
    assert not any(thread.name.startswith("staging") for thread in threading.enumerate())


@pytest.mark.gpu
def test_nothing_is_written_over_what_the_device_still_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "PIECE_BYTES", 2**20)
    monkeypatch.setattr(staging, "AHEAD_BYTES", 2**25)
    size, copies = 2**23, []
    work = torch.randn(8192, 8192, device="cuda")
    sent = (torch.full((size,), number, dtype=torch.uint8) for number in range(24))
    for tensor in staged(sent, torch.device("cuda")):
        work @ work  # the device is behind; the copy below reads memory that the loop has given back by then
        copies.append(tensor.clone())
    assert [each.unique().tolist() for each in copies] == [[number] for number in range(24)]
