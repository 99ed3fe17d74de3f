"""Random numbers of an engine that lives in the training process."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from lightning.pytorch.utilities.seed import isolate_rng


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the process's global generators inside the block and give the caller's state back after it.

    An in-process engine draws from them; without this, a rollout would depend on what the trainer drew before and the
    trainer on how long the rollout was.
    """
    with isolate_rng():
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)
        yield
