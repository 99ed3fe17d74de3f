"""Carry one version of weights to every engine, by Ray's object store."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import ray
import torch
from torch import Tensor
from typing_extensions import override

from tlt_lightning.engine.base import NamedTensors

GROUP_BYTES = 2**28
"""Tensors travel in groups of at least so many bytes, so that nobody ever holds the model twice."""

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # NumPy has no bfloat16


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

    The writer waits for its own copy alone, and steps on. A reader takes it when it likes: one that is slow, dead or
    new holds up nobody. Ray frees a snapshot when neither its writer nor a reader knows it any more.

    Args:
        version: Of the weights.
        groups: What is in a group, and Ray's handle of it.
    """

    version: int
    groups: tuple[tuple[tuple[TensorRecord, ...], ray.ObjectRef[Any]], ...]

    @classmethod
    def of(cls, named_tensors: NamedTensors, version: int, dtype: torch.dtype | None = None) -> Snapshot:
        """Copy tensors out of the writer, floating ones as `dtype`; they may change when this returns."""
        groups: list[tuple[tuple[TensorRecord, ...], ray.ObjectRef[Any]]] = []
        group: list[tuple[TensorRecord, Any]] = []
        for name, tensor in named_tensors:
            as_type = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
            copy = tensor.detach().to("cpu", as_type, copy=True).contiguous()
            record = TensorRecord(name, tuple(copy.shape), as_type, _checksum(copy))
            group.append((record, copy.view(_BITS[as_type.itemsize]).numpy()))
            if sum(array.nbytes for _, array in group) >= GROUP_BYTES:
                groups.append(_put(group))
                group = []
        return cls(version, (*groups, _put(group)) if group else tuple(groups))

    @override
    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield names and tensors, which are shared with other readers and must not be written.

        Raises:
            RuntimeError: A tensor is not what the writer sent.
        """
        for records, handle in self.groups:
            arrays = ray.get(handle)
            for record, array in zip(records, arrays, strict=True):
                with warnings.catch_warnings(action="ignore"):  # that it must not be written
                    tensor = torch.from_numpy(array).view(record.dtype)
                if tuple(tensor.shape) != record.shape or _checksum(tensor) != record.checksum:
                    raise RuntimeError(
                        f"{record.name} of version {self.version} arrived with other bits than were sent, and no "
                        "engine may write with it: memory or network of this node is at fault. Resume from the last "
                        "checkpoint without the node."
                    )
                yield record.name, tensor


def _put(group: list[tuple[TensorRecord, Any]]) -> tuple[tuple[TensorRecord, ...], ray.ObjectRef[Any]]:
    return tuple(record for record, _ in group), ray.put([array for _, array in group])


def _checksum(tensor: Tensor) -> int:
    hashed: Any = torch.hash_tensor(tensor).tolist() if tensor.numel() else 0
    return int(hashed)
