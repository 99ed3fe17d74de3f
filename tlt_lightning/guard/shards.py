"""Take the state of a sharded run apart by ranks, and put it together for any number of them.

Rank zero's rows stand in the checkpoint where a run that is not sharded has whole tensors; other ranks' are in their
parts of it, see `parts`. So a run goes on from it on other ranks, sharded or not, and reads no more rows than it holds.
"""

from collections.abc import Sequence
from typing import Any

from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

from tlt_lightning.sharding.rows import Rows

SHARDS = "shards"
"""Key of a checkpoint for the number of ranks with rows, and of a part for what it has of the states."""
_ROWS = "rows"
_STATES = ("state_dict", "optimizer_states")


def take_apart(checkpoint: dict[str, Any], num_shards: int) -> dict[str, Any]:
    """Replace sharded tensors of a checkpoint by this rank's rows of them; return the states with some."""
    states = {name: checkpoint[name] for name in _STATES if name in checkpoint}
    own = tree_map(lambda leaf: {_ROWS: leaf.to_local()} if isinstance(leaf, DTensor) else leaf, states)
    checkpoint |= {**own, SHARDS: num_shards}
    return own


def put_together(checkpoint: dict[str, Any], parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return a checkpoint with `Rows` in the place of every rank's rows.

    Args:
        checkpoint: As rank zero wrote it.
        parts: What `take_apart` returned on the other ranks, in their order.
    """

    def join(first: Any, *others: Any) -> Any:
        return Rows([each[_ROWS] for each in (first, *others)]) if _is_rows(first) else first

    states = {name: checkpoint[name] for name in _STATES if name in checkpoint}
    joined = tree_map(join, states, *parts, is_leaf=_is_rows)
    return {name: value for name, value in checkpoint.items() if name != SHARDS} | joined


def check_together(checkpoint: dict[str, Any]) -> None:
    """Raise ValueError if a checkpoint has rank zero's rows alone: something else than a Trainer has read it."""
    if SHARDS in checkpoint:
        raise ValueError(
            "The checkpoint is of a sharded run: give it to a Trainer as `ckpt_path`, or make a Hugging Face directory "
            "of it with `python -m tlt_lightning export`."
        )


def make_whole(state: Any) -> Any:
    """Return nested containers with whole tensors in the place of `Rows`."""
    return tree_map(lambda leaf: leaf.whole() if isinstance(leaf, Rows) else leaf, state)


def _is_rows(leaf: Any) -> bool:
    return isinstance(leaf, dict) and leaf.keys() == {_ROWS}
