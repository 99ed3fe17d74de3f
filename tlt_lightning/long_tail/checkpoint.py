"""Gather on rank zero what a checkpoint holds of the drafters of several workers.

Not a file per worker: Lightning copies, links and removes checkpoints, and tells a callback no names. Tensors travel
unpickled: pickled ones take several times their memory and ten times as long.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.apply_func import apply_to_collection
from torch import Tensor

log = logging.getLogger(__name__)

_SHARED = ("weights",)  # the same on all workers whenever a checkpoint may be saved


def make_group() -> dist.ProcessGroup:
    """Make a group of all ranks over gloo: NCCL would gather through the full GPU."""
    return dist.new_group(backend="gloo")


def gather_others(state: dict[str, Any], group: dist.ProcessGroup) -> list[dict[str, Any]]:
    """Return on rank zero the states of all other ranks, on the CPU, without what all share.

    Elsewhere it is empty. A collective, which fails if a rank has died.

    Args:
        state: This rank's `trainer` (see `DrafterTrainer.state_dict`) and `drift`; nested dictionaries and lists.
        group: From `make_group`.
    """
    if group.rank():
        own = {name: value for name, value in state["trainer"].items() if name not in _SHARED}
        _send({"trainer": own, "drift": state["drift"]}, group)
        return []
    return [_receive(rank, group) for rank in range(1, group.size())]


def state_of_rank(state: dict[str, Any], rank: int, world_size: int) -> dict[str, Any]:
    """Return the state that `rank` goes on from: its own, or rank zero's without hidden states.

    `state` is rank zero's, with what `gather_others` returned as `others`; missing `others` count as none. `world_size`
    is that of the run that goes on.
    """
    others = state.get("others", [])
    if rank == 0 and world_size != 1 + len(others):
        log.warning(
            "The checkpoint holds the drafter's state on %d workers, the run has %d: it goes on, but not exactly. "
            "Workers without a state of their own start with rank zero's optimizer and no hidden states.",
            1 + len(others),
            world_size,
        )
    if rank <= len(others):
        own = [{"trainer": {}}, *others][rank]
    else:
        own = {"trainer": {"buffer": {part: [] for part in state["trainer"]["buffer"]}}}
    return {**state, **own, "trainer": {**state["trainer"], **own["trainer"]}, "others": []}


def _send(state: Any, group: dist.ProcessGroup) -> None:
    shapes = apply_to_collection(state, Tensor, lambda tensor: tensor.to("meta"))
    dist.send_object_list([shapes], group_dst=0, group=group)
    apply_to_collection(state, Tensor, lambda tensor: dist.send(tensor.cpu().contiguous(), group_dst=0, group=group))


def _receive(rank: int, group: dist.ProcessGroup) -> Any:
    def fill(shape: Tensor) -> Tensor:
        tensor = torch.empty(shape.shape, dtype=shape.dtype)
        dist.recv(tensor, group=group, group_src=rank)
        return tensor

    shapes = [None]
    dist.recv_object_list(shapes, group=group, group_src=rank)
    return apply_to_collection(shapes[0], Tensor, fill)
