"""Read the rows of a sharded tensor, wherever they were saved."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


@dataclass(frozen=True, slots=True)
class Rows:
    """Holds a tensor that was sharded as the rows that each rank had, in the ranks' order; maybe still in files."""

    parts: list[Tensor]

    def whole(self) -> Tensor:
        """Return the tensor."""
        return torch.cat(self.parts)

    def between(self, start: int, stop: int) -> Tensor:
        """Return a copy of some rows, of which no others are read."""
        cut, first = [], 0
        for part in self.parts:
            cut.append(part[max(start - first, 0) : max(stop - first, 0)])
            first += len(part)
        return torch.cat(cut)


def sharded_as(value: Rows | Tensor, like: DTensor) -> DTensor:
    """Return a tensor of the shape of `like`, sharded as that is; a DTensor itself."""
    if isinstance(value, DTensor):
        return value
    size, first = compute_local_shape_and_global_offset(like.shape, like.device_mesh, like.placements)
    rows = value if isinstance(value, Rows) else Rows([value])
    held = rows.between(first[0], first[0] + size[0]).to(like.device)
    return DTensor.from_local(held, like.device_mesh, like.placements, shape=like.shape, stride=like.stride())
