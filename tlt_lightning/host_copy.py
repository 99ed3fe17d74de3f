"""Copy into host memory: device tensors into page-locked memory that is used again, and rows by one thread."""

import mmap
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
    """Holds bytes that a GPU copies to; exactly as many as asked for, where PyTorch takes the next power of two."""

    _cudart: Any
    _address: int

    def __new__(cls, size: int) -> Self:
        memory = super().__new__(cls, -1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # A child would share the pages: the next write here would go to a copy of its page, the GPU's to the child's.
        memory.madvise(mmap.MADV_DONTFORK)
        with suppress(OSError):  # a kernel without huge pages; with them page-locking takes half the time
            memory.madvise(mmap.MADV_HUGEPAGE)
        memory._cudart = torch.cuda.cudart()
        memory._address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
        torch.cuda.check_error(int(memory._cudart.cudaHostRegister(memory._address, size, 0)))
        return memory

    def __del__(self) -> None:
        self._cudart.cudaHostUnregister(self._address)


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

    def __del__(self) -> None:
        self.tensors  # noqa: B018 - a GPU may still copy to what is freed

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
