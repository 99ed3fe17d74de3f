"""Random choices that a resumed run makes again."""

from __future__ import annotations

import os
import zlib


def run_seed() -> int:
    """The seed given to `seed_everything`, or 0."""
    return int(os.environ.get("PL_GLOBAL_SEED", 0))


def seed_of(*parts: int | str) -> int:
    """A seed for one use of random numbers, the same in every run.

    Args:
        parts: What tells it from other uses: the run's seed, what is chosen, iteration, rank.
    """
    return zlib.crc32(repr(parts).encode())
