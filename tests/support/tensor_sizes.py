"""Measures of how large tensors grow inside a computation."""

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class LargestOfWidth(TorchDispatchMode):
    """Within the block, `rows` becomes the most rows of any tensor whose last dimension is `width`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width, self.rows = width, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.dim() >= 2 and result.shape[-1] == self.width:
            self.rows = max(self.rows, result.numel() // self.width)
        return result


class MostAtOnceOfWidth(TorchDispatchMode):
    """Within the block, `rows` becomes the most rows that tensors of last dimension `width` hold at the same time."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width, self.rows = width, 0
        self._alive: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.dim() >= 2 and result.shape[-1] == self.width:
            storage = result.untyped_storage()
            if storage._cdata not in self._alive:
                self._alive[storage._cdata] = result.numel() // self.width
                weakref.finalize(storage, self._alive.pop, storage._cdata, None)
            self.rows = max(self.rows, sum(self._alive.values()))
        return result
