"""Copy into host memory: device tensors into page-locked memory that is used again, and rows by one thread."""

import mmap
import os
from collections.abc import Iterable
from contextlib import suppress
from copy import deepcopy
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten


def copy_alone(rows: Tensor, place: Tensor) -> None:
    """Copy from host memory to host memory by this thread.

    PyTorch would share the work among threads, and wait for each of them where other programs take a core.
    """
    np.copyto(place.view(torch.uint8).numpy(), rows.view(torch.uint8).numpy())


class _PageLocked(mmap.mmap):
    """Holds bytes that a GPU copies to and from: as many as asked for, where PyTorch takes the next power of two.

    A child that is forked shares them. Were they copied on write, this process's next write would get a new page, and
    the GPU go on with the old one.
    """

    _owner, _address = 0, 0

    def __new__(cls, size: int) -> Self:
        memory = super().__new__(cls, -1, size)
        address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
        torch.cuda.check_error(int(torch.cuda.cudart().cudaHostRegister(address, size, 0)))
        memory._owner, memory._address = os.getpid(), address
        return memory

    def __del__(self) -> None:
        with suppress(Exception):  # as the interpreter ends, modules go
            if self._owner == os.getpid():
                torch.cuda.synchronize()  # PyTorch's own memory would wait for copies under way
                torch.cuda.cudart().cudaHostUnregister(self._address)


def _page_locked(like: Tensor) -> Tensor:
    """Return page-locked memory for a tensor."""
    return torch.frombuffer(_PageLocked(like.nbytes), dtype=torch.uint8).view(like.dtype).view(like.shape)


class HostCopy:
    """Holds copies of named tensors on the host, filled at the speed of the GPU's bus.

    Memory is kept for the next `fill`: pageable memory takes ten times as long, page-locking anew longer than the copy.

    Example:
        >>> copy = HostCopy()
        >>> copy.fill([("weight", torch.ones(2))])
        >>> copy.tensors["weight"]
        tensor([1., 1.])
    """

    def __init__(self) -> None:
        self._tensors: dict[str, Tensor] = {}
        self._copied: torch.cuda.Event | None = None

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Return the last copy, complete; the next `fill` may reuse the memory."""
        if self._copied is not None:
            self._copied.synchronize()
            self._copied = None
        return self._tensors

    def fill(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copy tensors over the earlier ones in the current stream, without waiting for a GPU."""
        earlier, self._tensors = self.tensors, {}
        device: torch.device | None = None
        for name, tensor in tensors:
            host, pins = earlier.get(name), tensor.is_cuda and tensor.nbytes > 0
            fits = host is not None and host.shape == tensor.shape and host.dtype == tensor.dtype
            if host is None or not fits or (pins and not host.is_pinned()):
                host = _page_locked(tensor) if pins else torch.empty(tensor.shape, dtype=tensor.dtype)
            self._tensors[name] = host.copy_(tensor.detach(), non_blocking=True)
            device = tensor.device if tensor.is_cuda else device
        if device is not None:
            self._copied = torch.cuda.current_stream(device).record_event()

    def fill_state(self, state: Any) -> Any:
        """Return a copy of nested containers whose tensors lie in this memory, complete.

        Tensors of the same memory share their copy, as tied weights must in a file. Tensors of a class of their own
        (quantised optimizer states) get memory of their own.
        """
        leaves, structure = tree_flatten(state)
        names: list[str | None] = [None] * len(leaves)
        known: dict[Any, str] = {}
        for number, leaf in enumerate(leaves):
            if type(leaf) in (Tensor, torch.nn.Parameter) and leaf.layout is torch.strided:
                place = (leaf.device, leaf.data_ptr(), leaf.shape, leaf.stride(), leaf.dtype)
                names[number] = known.setdefault(place, str(number))
        self.fill(
            (name, leaf) for number, (name, leaf) in enumerate(zip(names, leaves, strict=True)) if name == str(number)
        )
        tensors = self.tensors
        copies = [_copy(leaf) if name is None else tensors[name] for name, leaf in zip(names, leaves, strict=True)]
        return tree_unflatten(copies, structure)


def _copy(leaf: Any) -> Any:
    return leaf.detach().to("cpu", copy=True) if isinstance(leaf, Tensor) else deepcopy(leaf)
