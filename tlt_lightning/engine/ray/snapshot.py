"""Carry one version of weights to every engine, by Ray's object store."""

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
from tlt_lightning.engine.ray.staging import staged
from tlt_lightning.host_copy import HostCopy

GROUP_BYTES = 2**28
"""Tensors travel in groups of at least so many bytes, so that nobody ever holds the model twice."""

_CHECKSUMS = ""  # in place of a tensor's name


@dataclass(frozen=True)
class TensorRecord:
    """Says what a tensor of a snapshot must be on arrival.

    Args:
        name: The tensor's name in Hugging Face's files.
        shape: Its shape.
        dtype: Its type.
        checksum: The checksum of its bits.
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
        version: The weights' version.
        records: The records of all tensors, in the order in which they are read.
        groups: Ray's handles of their bytes, of several tensors each.
        accepted: Share of a drafter's drafts that the policy accepts, by position; None if unknown, or not a drafter's.
    """

    version: int
    records: tuple[TensorRecord, ...]
    groups: tuple[ray.ObjectRef[Any], ...]
    accepted: Sequence[float] | None = None

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes by name, with nothing read: a device need not hold all tensors beside the engine."""
        return {record.name: record.shape for record in self.records}

    @override
    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield names and tensors on the engine's device; on a CPU other readers share them, and none may write.

        Raises:
            RuntimeError: A tensor is not what the writer sent.
        """
        tensors = self._read()
        if torch.cuda.is_initialized():  # where checksums take no time
            tensors = staged(tensors, torch.device("cuda", torch.cuda.current_device()))
        for record, tensor in zip(self.records, tensors, strict=True):
            tensor = tensor.view(record.dtype).view(record.shape)
            if _checksum(tensor).item() != record.checksum:
                raise RuntimeError(
                    f"{record.name} of version {self.version} arrived with other bits than were sent, and no engine "
                    "may write with it: memory or network of this node is at fault. Resume from the last checkpoint "
                    "without the node."
                )
            yield record.name, tensor

    def _read(self) -> Iterator[Tensor]:
        for group in self.groups:
            with warnings.catch_warnings(action="ignore"):  # that they must not be written
                tensors = [torch.from_numpy(array) for array in ray.get(group)]
            yield from tensors


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
        dtype: str | None = None,
        accepted: Sequence[float] | None = None,
    ) -> Future[Snapshot]:
        """Copy tensors, floating ones as `dtype` where that is smaller; they may change when this returns."""
        if self._last is not None:
            self._last.result()
        self._copy.fill(_with_checksums(named_tensors, None if dtype is None else getattr(torch, dtype)))
        self._last = self._thread.submit(self._hand_over, version, accepted)
        return self._last

    def close(self) -> None:
        """Wait for the snapshot that is being handed over; safe to call twice."""
        self._thread.shutdown()

    def _hand_over(self, version: int, accepted: Sequence[float] | None) -> Snapshot:
        tensors = dict(self._copy.tensors)
        checksums = tensors.pop(_CHECKSUMS).tolist() if tensors else []
        records, groups, group = [], [], []
        for (name, tensor), checksum in zip(tensors.items(), checksums, strict=True):
            records.append(TensorRecord(name, tuple(tensor.shape), tensor.dtype, checksum))
            group.append(tensor.view(-1).view(torch.uint8).numpy())  # NumPy has no bfloat16
            if sum(array.nbytes for array in group) >= GROUP_BYTES:
                groups.append(ray.put(group))
                group = []
        return Snapshot(version, tuple(records), (*groups, ray.put(group)), accepted)


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


def _checksum(tensor: Tensor) -> Tensor:
    return torch.hash_tensor(tensor) if tensor.numel() else torch.zeros((), dtype=torch.uint64, device=tensor.device)
