"""Divide a drafter's state into the part that all ranks share and each rank's own."""

import logging
from typing import Any

log = logging.getLogger(__name__)


def to_checkpoint(state: dict[str, Any], rank: int, num_ranks: int) -> dict[str, Any]:
    """Take a rank's own part out of `state`, and return it; `state` remembers the number of ranks."""
    own = dict(state["trainer"])
    # Weights are the same on all ranks whenever a checkpoint may be saved.
    state |= {"trainer": {"weights": own.pop("weights")}, "num_workers": num_ranks}
    return {"rank": rank, "trainer": own}


def from_checkpoint(state: dict[str, Any], own: dict[str, Any], rank: int) -> dict[str, Any]:
    """Return the whole state that `rank` goes on from: its own, or rank zero's without hidden states.

    Args:
        state: What `to_checkpoint` has left.
        own: What it returned on this rank, or on rank zero where nothing is there of this one.
        rank: This rank's number in the run that goes on.
    """
    trainer = {**state["trainer"], **own["trainer"]}
    if own["rank"] != rank:
        trainer["buffer"] = {part: [] for part in trainer["buffer"]}
        log.warning(
            "The drafter's state of rank %d is not beside the checkpoint, which %d ranks wrote: it goes on, but not "
            "exactly, with rank zero's optimizer and no hidden states. `<name>.ckpt.ranks` belongs to a checkpoint.",
            *(rank, state["num_workers"]),
        )
    return {**state, "trainer": trainer}
