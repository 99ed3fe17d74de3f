"""Carry one version of weights to every engine, by Ray's object store."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import ray
import torch
from torch import Tensor
from typing_extensions import override

from tlt_lightning.engine.base import NamedTensors
from tlt_lightning.host_copy import HostCopy

GROUP_BYTES = 2**28
"""Tensors travel in groups of at least so many bytes, so that nobody ever holds the model twice."""

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # NumPy has no bfloat16
_CHECKSUMS = ""  # in place of a tensor's name


@dataclass(frozen=True)
class TensorRecord:
    """Says what a tensor of a snapshot must be on arrival.

    Args:
        name: In Hugging Face's names.
        shape: Of the tensor.
        dtype: Of the tensor.
        checksum: Of its bits.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    checksum: int


@dataclass(frozen=True)
class Snapshot(Iterable[tuple[str, Tensor]]):
    """Holds one version of weights outside of all processes; iterate over it to read the tensors.

    A reader takes it when it likes: one that is slow, dead or new holds up nobody. Engines of a node read the same
    memory. Ray frees a snapshot when neither its writer nor a reader knows it any more.

    Args:
        version: Of the weights.
        groups: What is in a group, and Ray's handle of it.
        accepted: Share of a drafter's drafts that the policy accepts, by position; None if unknown, or not a drafter's.
    """

    version: int
    groups: tuple[tuple[tuple[TensorRecord, ...], ray.ObjectRef[Any]], ...]
    accepted: Sequence[float] | None = None

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes by name, with nothing read: a device need not hold all tensors beside the engine."""
        return {record.name: record.shape for record in self.records}

    @property
    def records(self) -> list[TensorRecord]:
        """Records of all tensors, in the order in which they are read."""
        return [record for records, _ in self.groups for record in records]

    @override
    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield names and tensors on the engine's device; on a CPU other readers share them, and none may write.

        Raises:
            RuntimeError: A tensor is not what the writer sent.
        """
        device = "cuda" if torch.cuda.is_initialized() else "cpu"  # where checksums take no time
        for records, handle in self.groups:
            arrays = ray.get(handle)
            for record, array in zip(records, arrays, strict=True):
                with warnings.catch_warnings(action="ignore"):  # that it must not be written
                    tensor = torch.from_numpy(array).view(record.dtype).to(device)
                if tuple(tensor.shape) != record.shape or _checksum(tensor).item() != record.checksum:
                    raise RuntimeError(
                        f"{record.name} of version {self.version} arrived with other bits than were sent, and no "
                        "engine may write with it: memory or network of this node is at fault. Resume from the last "
                        "checkpoint without the node."
                    )
                yield record.name, tensor


class SnapshotWriter:
    """Copies weights out of their device, then hands them to Ray in a thread, while the policy learns on.

    The trainer queues the copy on its device and waits for nothing, unless the snapshot before is still being handed
    over. The host's memory is page-locked, and used again by the next.
    """

    def __init__(self) -> None:
        self._copy, self._thread = HostCopy(), ThreadPoolExecutor(1, thread_name_prefix="snapshot")
        self._last: Future[Snapshot] | None = None

    def write(
        self,
        named_tensors: NamedTensors,
        version: int,
        dtype: torch.dtype | None = None,
        accepted: Sequence[float] | None = None,
    ) -> Future[Snapshot]:
        """Copy tensors, floating ones as `dtype` where that is smaller; they may change when this returns."""
        if self._last is not None:
            self._last.result()
        self._copy.fill(_with_checksums(named_tensors, dtype))
        self._last = self._thread.submit(self._hand_over, version, accepted)
        return self._last

    def close(self) -> None:
        """Wait for the snapshot that is being handed over; safe to call twice."""
        self._thread.shutdown()

    def _hand_over(self, version: int, accepted: Sequence[float] | None) -> Snapshot:
        tensors = dict(self._copy.tensors)
        checksums = tensors.pop(_CHECKSUMS).tolist() if tensors else []
        groups: list[tuple[tuple[TensorRecord, ...], ray.ObjectRef[Any]]] = []
        group: list[tuple[TensorRecord, Any]] = []
        for (name, tensor), checksum in zip(tensors.items(), checksums, strict=True):
            record = TensorRecord(name, tuple(tensor.shape), tensor.dtype, checksum)
            group.append((record, tensor.view(_BITS[tensor.itemsize]).numpy()))
            if sum(array.nbytes for _, array in group) >= GROUP_BYTES:
                groups.append(_put(group))
                group = []
        return Snapshot(version, (*groups, _put(group)) if group else tuple(groups), accepted)


def _with_checksums(named_tensors: NamedTensors, dtype: torch.dtype | None) -> NamedTensors:
    """Yield tensors as they travel, and last the checksums of all."""
    checksums = []
    for name, tensor in named_tensors:
        is_smaller = dtype is not None and tensor.is_floating_point() and dtype.itemsize < tensor.itemsize
        sent = tensor.detach().to(dtype if is_smaller else tensor.dtype).contiguous()
        checksums.append(_checksum(sent))
        yield name, sent
    if checksums:  # on one device: a drafter's published weights lie on the host, its policy's rows do not
        yield _CHECKSUMS, torch.stack([each.to(sent.device) for each in checksums])


def _put(group: list[tuple[TensorRecord, Any]]) -> tuple[tuple[TensorRecord, ...], ray.ObjectRef[Any]]:
    return tuple(record for record, _ in group), ray.put([array for _, array in group])


def _checksum(tensor: Tensor) -> Tensor:
    return torch.hash_tensor(tensor) if tensor.numel() else torch.zeros((), dtype=torch.uint64, device=tensor.device)
