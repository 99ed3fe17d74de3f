"""Keep what each rank alone needs beside a checkpoint: one file a rank, whole before the checkpoint is.

A callback or module puts what is its rank's into `checkpoint[OWN]`. Rank zero's stays there; the other ranks write
theirs to `<name>.ckpt.ranks/`, under a token that the checkpoint remembers, before it is written itself: where a
checkpoint is, its parts are whole. A checkpoint that is overwritten keeps its own until the new one is in its place. A
rank whose part is missing reads rank zero's. Parts with shards are written behind the run, as the checkpoint is, whose
writing waits until they are there.
"""

import logging
import secrets
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import Strategy

from tlt_lightning.guard.files import write_whole
from tlt_lightning.guard.shards import SHARDS, take_apart
from tlt_lightning.training.fsdp2 import FSDP2Strategy

log = logging.getLogger(__name__)

OWN = "own"
"""Key of a checkpoint for what a rank alone needs, by owner."""
TOKEN = "parts"
"""Key of a checkpoint for the token of its parts, where it has some."""


def save_with_parts(
    trainer: L.Trainer, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None
) -> None:
    """Replace `Strategy.save_checkpoint`, which has ranks but zero do nothing; a collective."""
    strategy, rank = trainer.strategy, trainer.global_rank
    own = {} if strategy.is_global_zero else checkpoint.get(OWN, {})
    has_others = trainer.world_size > 1
    # After an error others may not come; only a local folder is one that all write to.
    can_meet = has_others and not trainer.interrupted and "://" not in str(filepath)
    if isinstance(strategy, FSDP2Strategy):
        if has_others and not can_meet:
            log.error("%s is not written: it needs every rank's shard, in a local folder, before an error.", filepath)
            return
        states = take_apart(checkpoint, strategy.num_shards)
        own |= {SHARDS: states} if 0 < rank < strategy.num_shards else {}
    if can_meet and strategy.reduce_boolean_decision(bool(own), all=False):
        checkpoint[TOKEN] = strategy.broadcast(secrets.token_hex(4))
        target = _folder(filepath) / _name(rank, checkpoint[TOKEN])
        if SHARDS in own:
            strategy.checkpoint_io.save_part(own, target)  # type: ignore[attr-defined]
        elif own:
            write_whole(own, target)
        strategy.barrier("parts of a checkpoint")
    Strategy.save_checkpoint(strategy, checkpoint, filepath, storage_options)


def missing_parts(path: Any, token: str, num_shards: int) -> list[Path]:
    """Return the parts with shards that are not there yet."""
    parts = [_folder(path) / _name(rank, token) for rank in range(1, num_shards)]
    return [part for part in parts if not part.exists()]


def read_part(path: Any, token: str, rank: int) -> dict[str, Any] | None:
    """Return what `rank` had of its own; None if that is not there, as beside a copy of the checkpoint alone."""
    folder = Path(path).resolve().parent  # whatever its name is now
    found = next(folder.glob(f"*.ranks/{_name(rank, token)}"), None)
    return None if found is None else torch.load(found, map_location="cpu", weights_only=True, mmap=True)


def remove_parts(path: Any, besides: str | None = None) -> None:
    """Delete the parts of a checkpoint, or all but those of the token `besides`."""
    folder = _folder(path)
    for part in folder.glob("*.pt"):
        if besides is None or not part.stem.endswith(besides):
            part.unlink(missing_ok=True)
    with suppress(OSError):  # not empty
        folder.rmdir()


def remove_lost_parts(folder: Path) -> list[Path]:
    """Delete parts whose checkpoint never came, or is gone, and return their folders."""
    lost = [parts for parts in folder.glob("*.ckpt.ranks") if not parts.with_suffix("").exists()]
    for parts in lost:
        shutil.rmtree(parts)
    return lost


def _folder(path: Any) -> Path:
    return Path(f"{path}.ranks")


def _name(rank: int, token: str) -> str:
    return f"{rank}-{token}.pt"
