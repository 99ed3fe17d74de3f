"""Map a small network into a wide one: copies of each small dimension, and their factors.

A wide vector holds each small dimension several times. Where a matrix writes, all copies get the same value; where one
reads, each copy counts for a power of two, and those of a dimension add up to one. Nothing is rounded by that: products
with powers of two are exact, in bfloat16 too, so the wide sums are the small ones in another order. No weight is zero
that was not, and RMSNorm needs no change, as the mean square of seven copies is that of one. (Net2Net, Chen et al.,
2016, arXiv 1511.05641, widens networks by copies too.)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Axis:
    """Maps one axis of a wide matrix.

    Args:
        source: The small dimension behind each wide one. (wide,), int64
        write: What a small value is multiplied by where it is stored; 0 stores nothing. (wide,)
        read: What it counts for where it is read; over the copies of a dimension, `read * write` adds up to 1. (wide,)
    """

    source: Tensor
    write: Tensor
    read: Tensor

    def __len__(self) -> int:
        return len(self.source)


def shares(source: Tensor) -> Tensor:
    """Return powers of two, nearly equal, that sum to 1 over equal entries of `source`: (wide,)."""
    counts = torch.bincount(source)
    order = source.argsort(stable=True)
    rank = torch.empty_like(source)
    rank[order] = torch.arange(len(source)) - (counts.cumsum(0) - counts)[source[order]]
    copies = counts[source]
    base = 2 ** copies.double().log2().floor().long()  # so many shares of 1 / base, the surplus splits some in two
    return torch.where(rank < 2 * (copies - base), 0.5 / base, 1.0 / base)


def copied(small: int, wide: int) -> Axis:
    """Return an axis of `wide` dimensions that copies `small` ones in turn, or raise ValueError."""
    if wide < small:
        raise ValueError(f"A wide axis of {wide} has no room for {small} dimensions.")
    source = torch.arange(wide) % small
    return Axis(source, torch.ones(wide), shares(source))


def residual(small: int, wide: int) -> Axis:
    """Return the residual stream's axis: equal copies, but one makes room for a constant.

    The last wide dimension, a copy of the last small one, is kept free. The other copies of that dimension are scaled
    up, so that its share of the mean square stays what it was.
    """
    copies = wide // small
    if wide % small or copies < 2:
        raise ValueError(f"The wide `hidden_size` must be a multiple of {small}, at least {2 * small}; got {wide}.")
    source = torch.arange(wide) % small
    scaled = source == small - 1
    write, read = torch.ones(wide), torch.ones(wide)
    write[scaled] = (copies / (copies - 1)) ** 0.5
    read[:-1] = shares(source[:-1])
    write[-1] = read[-1] = 0.0
    return Axis(source, write, read / torch.where(write > 0, write, 1.0))


def heads(small: tuple[int, int], wide: tuple[int, int], head_dim: int) -> tuple[Axis, Axis]:
    """Return the axes of queries and of keys and values; heads copy those of their group.

    Args:
        small: Numbers of query heads and of key-value heads of the small network.
        wide: The same of the wide one.
        head_dim: Of both networks.
    """
    (queries, groups), (wide_queries, wide_groups) = small, wide
    size, wide_size = queries // groups, wide_queries // wide_groups
    if wide_groups % groups or wide_size < size:
        raise ValueError(
            f"{wide_queries} query heads in {wide_groups} groups have no room for {queries} in {groups} groups: the "
            "groups must be a multiple, each as large."
        )
    head = torch.arange(wide_queries)
    query_source = (head // wide_size % groups) * size + head % wide_size % size
    query = _blocks(query_source, head_dim)
    return query, _blocks(torch.arange(wide_groups) % groups, head_dim)


def _blocks(source: Tensor, size: int) -> Axis:
    """Return an axis that copies whole blocks of `size` dimensions."""
    dims = (source[:, None] * size + torch.arange(size)).flatten()
    return Axis(dims, torch.ones(len(dims)), shares(dims))


def side_by_side(axis: Axis, small: int, times: int) -> Axis:
    """Return the axis of `times` vectors of one kind end to end, of `small` dimensions each."""
    source = torch.cat([axis.source + small * index for index in range(times)])
    return Axis(source, axis.write.repeat(times), axis.read.repeat(times))


def pad_matrix(weight: Tensor, rows: Axis, columns: Axis) -> Tensor:
    """Return the float32 matrix that maps widened vectors as `weight` maps small ones.

    Raises:
        ValueError: The axes are not those of `weight`.
    """
    device, wanted = weight.device, (int(rows.source.max()) + 1, int(columns.source.max()) + 1)
    if tuple(weight.shape) != wanted:
        raise ValueError(f"The weight is {tuple(weight.shape)}, but its axes are made for {wanted}.")
    wide = weight.float()[rows.source.to(device)][:, columns.source.to(device)]
    return wide.mul_(rows.write.to(device)[:, None]).mul_(columns.read.to(device))


def cancelling(count: int) -> tuple[Tensor, Tensor]:
    """Split `count` equal values into sets of weighted sum zero; return sets and weights.

    Pairs weigh 1 and -1; where the count is odd, the last three weigh 1, 1 and -2. Both are exact in any precision.
    """
    if count < 2:
        raise ValueError(f"{count} value cannot cancel; it takes two.")
    index = torch.arange(count)
    sets, weights = index // 2, 1.0 - 2.0 * (index % 2)
    if count % 2:
        sets[-1] = sets[-2]
        weights[-3:] = torch.tensor([1.0, 1.0, -2.0])
    return sets, weights
