"""Iterate over what a RolloutDataModule gives the Trainer."""

import warnings
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

import lightning as L
from lightning.pytorch.utilities.exceptions import MisconfigurationException

Item = TypeVar("Item")


class RolloutLoader(Generic[Item]):
    """Yields batches lazily, with a length; the first `next` of each epoch rolls out anew.

    Sized, because Lightning prefetches one batch of an iterable without length, which would then be one update stale.
    Lazy, because Lightning calls `iter` before `on_train_start` and once more to look at the type.

    Args:
        length: How many items each pass yields.
        iterate: A generator function that yields them.
    """

    def __init__(self, length: int, iterate: Callable[[], Iterator[Item]]) -> None:
        self._length = length
        self._iterate = iterate

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Item]:
        yield from self._iterate()


def num_held_out_batches(trainer: L.Trainer) -> int:
    """Return the batches that the Trainer takes of the held-out loader, which it is iterating."""
    if trainer.sanity_checking:
        batches = trainer.num_sanity_val_batches
    elif trainer.testing:
        batches = trainer.num_test_batches
    else:
        batches = trainer.num_predict_batches if trainer.predicting else trainer.num_val_batches
    return int(batches[0])


def check_held_out(trainer: L.Trainer, num_prompts: int) -> None:
    """Raise MisconfigurationException if a rank has no held-out prompt."""
    if num_prompts < (num_ranks := trainer.world_size):
        raise MisconfigurationException(
            f"`data.val` has {num_prompts} prompts, fewer than {num_ranks} ranks; give each one."
        )


def ignore_needless_warnings() -> None:
    """Ignore Lightning's warnings of a healthy run that ask for nothing."""
    for message in (
        ".*sync_dist=True.*",  # what is logged has been combined over the ranks
        "Total length of `list`.*",  # held-out prompts may be left out
        "Couldn't infer the batch indices.*",  # completions bring their own
        "Checkpoint directory .* exists and is not empty.*",  # in every run that is resumed
        "You're resuming from a checkpoint that ended before.*",  # they go on exactly
        r"`isinstance\(treespec, LeafSpec\)` is deprecated.*",  # Lightning's own line under torch 2.13
    ):
        warnings.filterwarnings("ignore", message=message)
