"""Combine values of all ranks of a run; each function is a collective."""

from typing import TypeVar

import lightning as L
import torch
from torch import Tensor

T = TypeVar("T")


def sum_over_ranks(trainer: L.Trainer, value: Tensor) -> Tensor:
    """Return the sum of every rank's `value`, which stays as it is."""
    if trainer.world_size == 1:
        return value
    summed = value.to(trainer.strategy.root_device, copy=True)  # it is reduced in place
    return trainer.strategy.reduce(summed, reduce_op="sum").to(value)


def largest_over_ranks(trainer: L.Trainer, values: Tensor) -> Tensor:
    """Return the largest of every rank's `values`, which stay as they are, for each place."""
    largest = values.to(trainer.strategy.root_device, copy=True)  # it is reduced in place
    return trainer.strategy.reduce(largest, reduce_op="max").to(values)


def gather_over_ranks(trainer: L.Trainer, own: T) -> list[T]:
    """Return every rank's `own`, which can be pickled, in their order."""
    ranks = [own] * trainer.world_size
    if trainer.world_size > 1:
        torch.distributed.all_gather_object(ranks, own)
    return ranks
