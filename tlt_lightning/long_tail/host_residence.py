"""Keep a module and its optimizer's state in host memory, and lend them to the device."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tlt_lightning.host_copy import HostCopy


class HostResidence:
    """Moves a module and its optimizer's state to `device` while they are used, and back; exact.

    Parameters stay the objects that they are. Gradients are dropped on the way back.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self.module = module
        self.device = device
        self._host = HostCopy()
        self._depth = 0

    @contextmanager
    def on_device(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Lend both to the device; within another call of this nothing moves.

        OutOfMemoryError, with both where they were, means that the device has no room for all of it.
        """
        if not self._depth:
            there = [
                (tensor.to(self.device, non_blocking=True, copy=True), tensor, state, name)
                for tensor, state, name in self._tensors(optimizer, torch.device("cpu"))
            ]
            for moved in there:
                _put(*moved)
            del there, moved  # else what training replaces would live on
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if not self._depth:
                optimizer.zero_grad()
                self._bring_back(optimizer)

    def _bring_back(self, optimizer: torch.optim.Optimizer) -> None:
        lent = list(self._tensors(optimizer, self.device))
        self._host.fill((str(number), tensor) for number, (tensor, _, _) in enumerate(lent))
        for (tensor, state, name), host in zip(lent, self._host.tensors.values(), strict=True):
            _put(host, tensor, state, name)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # the engine allocates apart from PyTorch's cache

    def _tensors(
        self, optimizer: torch.optim.Optimizer, device: torch.device
    ) -> Iterator[tuple[Tensor, MutableMapping[str, Any] | None, str]]:
        """Yield what lies on `device`: parameters and buffers, and with its dictionary the optimizer's state.

        Adam counts steps on the host, or on the device if it is fused: one element is not worth moving.
        """
        yield from ((tensor, None, "") for tensor in (*self.module.parameters(), *self.module.buffers()))
        for state in optimizer.state.values():
            for name, value in state.items():
                if isinstance(value, Tensor) and value.numel() > 1 and value.device.type == device.type:
                    yield value, state, name


def _put(new: Tensor, old: Tensor, state: MutableMapping[str, Any] | None, name: str) -> None:
    if state is None:
        old.data = new
    else:
        state[name] = new
