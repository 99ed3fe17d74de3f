"""Copies of device tensors in host memory that is page-locked once and used again."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class HostCopy:
    """Holds copies of named tensors on the host; for tensors of a GPU at the speed of its bus.

    Pageable memory takes ten times as long, and page-locking anew takes longer than the copy, so memory is kept from
    one `fill` to the next.

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
        """Return what was copied last, complete; the next `fill` may reuse the memory."""
        if self._copied is not None:
            self._copied.synchronize()
            self._copied = None
        return self._tensors

    def fill(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copy these tensors in the place of the earlier ones; does not wait for a GPU.

        The copy comes, in the order of the current stream, before whatever is done to the tensors next.
        """
        earlier, self._tensors = self.tensors, {}
        device: torch.device | None = None
        for name, tensor in tensors:
            host = earlier.get(name)
            must_pin = tensor.is_cuda and host is not None and not host.is_pinned()
            if host is None or host.shape != tensor.shape or host.dtype != tensor.dtype or must_pin:
                host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._tensors[name] = host.copy_(tensor.detach(), non_blocking=True)
            device = tensor.device if tensor.is_cuda else device
        if device is not None:
            self._copied = torch.cuda.current_stream(device).record_event()
