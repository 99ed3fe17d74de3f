"""Make random choices that a resumed run makes again."""

from __future__ import annotations

import os
import zlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import lightning as L


def given_seed() -> int | None:
    """Return the seed given to `seed_everything`, None where it was not called."""
    seed = os.environ.get("PL_GLOBAL_SEED")  # where Lightning leaves it
    return None if seed is None else int(seed)


def run_seed() -> int:
    """Return the seed given to `seed_everything`, or 0."""
    return given_seed() or 0


def seed_of(*parts: int | str) -> int:
    """Return a seed for one use of random numbers, the same in every run.

    It has 32 bits, as many as a generator takes on a CPU. Of four billion pairs of uses about one shares it, which
    repeats a sample only where prompt and weights are the same, too.

    Args:
        parts: Tell this use from others: the run's seed, what is chosen, iteration, rank.
    """
    return zlib.crc32(repr(parts).encode())


def iteration_seed(trainer: L.Trainer, *use: int | str) -> int:
    """Return the seed for one use of random numbers in this iteration and on this rank."""
    return seed_of(run_seed(), *use, trainer.current_epoch, trainer.global_rank)
