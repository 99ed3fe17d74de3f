"""Weights that travel by Ray's object store."""

import pytest
import ray
import torch

from tlt_lightning.engine.ray import snapshot, staging
from tlt_lightning.engine.ray.snapshot import SnapshotWriter

pytestmark = pytest.mark.ray

TENSORS = {
    "float": torch.randn(4, 3),
    "half": torch.randn(7).to(torch.bfloat16),
    "scalar": torch.tensor(2.5),
    "whole": torch.arange(5),
    "strided": torch.randn(6, 4).t(),
    "empty": torch.zeros(0, 3),
}


@pytest.mark.parametrize("group_bytes", [1, 64, 2**28])
def test_tensors_arrive_as_they_were_when_they_were_sent(
    cluster: None, monkeypatch: pytest.MonkeyPatch, group_bytes: int
) -> None:
    monkeypatch.setattr(snapshot, "GROUP_BYTES", group_bytes)
    live = {name: tensor.clone() for name, tensor in TENSORS.items()}
    writer = SnapshotWriter()
    writing = writer.write(live.items(), 3)
    for tensor in live.values():
        tensor.zero_()  # as an optimizer's step does
    sent = writing.result()
    assert sent.shapes == {name: tuple(tensor.shape) for name, tensor in TENSORS.items()}
    writer.write(live.items(), 4).result()  # into the same memory
    found = ray.get(ray.remote(lambda weights: (weights.version, dict(weights))).remote(sent))
    assert found[0] == 3
    assert found[1].keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert found[1][name].dtype == tensor.dtype
        assert torch.equal(found[1][name], tensor)


def test_floating_tensors_travel_in_the_engines_type_if_that_is_smaller(cluster: None) -> None:
    found = dict(SnapshotWriter().write(TENSORS.items(), 0, "bfloat16").result())
    assert found["whole"].dtype == torch.int64
    assert dict(SnapshotWriter().write(TENSORS.items(), 0, "float32").result())["half"].dtype == torch.bfloat16
    assert torch.equal(found["float"], TENSORS["float"].to(torch.bfloat16))


@pytest.mark.gpu
def test_a_gpu_reads_them_into_memory_of_its_own(cluster: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "PIECE_BYTES", 16)
    torch.cuda.init()
    found = dict(SnapshotWriter().write(TENSORS.items(), 3).result())
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert (found[name].device.type, found[name].dtype) == ("cuda", tensor.dtype)
        assert torch.equal(found[name].cpu(), tensor)


def test_checksums_of_tensors_of_several_devices_travel_together() -> None:
    tensors = [("published", torch.ones(2)), ("policy's rows", torch.ones(2, device="meta"))]
    (_, _), (_, _), (name, checksums) = snapshot._with_checksums(tensors, None)
    assert (name, checksums.device.type, len(checksums)) == ("", "meta", 2)
