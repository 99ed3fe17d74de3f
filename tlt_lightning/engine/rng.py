"""Random numbers of an engine that lives in the training process."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


class EngineRandom:
    """Random numbers of its own for an engine that draws from the process's global generators.

    They are put in force while the engine works and taken out before anybody else does, so that a rollout does not
    depend on draws of the trainer, its callbacks or whoever consumes responses, nor these on the rollout. Of NumPy
    the generator is exchanged, not its state (0.1 us instead of 50): a normal number held in reserve is dropped.

    Args:
        seed: The same seed gives the same numbers.
    """

    def __init__(self, seed: int) -> None:
        self._torch = torch.Generator().manual_seed(seed).get_state()
        self._cuda = torch.Generator("cuda").manual_seed(seed).get_state() if torch.cuda.is_available() else None
        self._python = random.Random(seed).getstate()
        self._numpy = np.random.MT19937()
        self._numpy.state = np.random.RandomState(seed % 2**32).get_state(legacy=False)  # type: ignore[assignment]

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """Draw from these numbers inside the block, and go on with the caller's after it, whatever happened."""
        self._exchange()
        callers = np.random.get_bit_generator()  # type: ignore[attr-defined]
        np.random.set_bit_generator(self._numpy)  # type: ignore[attr-defined]
        try:
            yield
        finally:
            self._exchange()
            np.random.set_bit_generator(callers)  # type: ignore[attr-defined]

    def _exchange(self) -> None:
        """Exchange the states held here with those of the global generators."""
        held, self._torch = self._torch, torch.get_rng_state()
        torch.set_rng_state(held)
        state, self._python = self._python, random.getstate()
        random.setstate(state)
        if self._cuda is not None:
            held, self._cuda = self._cuda, torch.cuda.get_rng_state()
            torch.cuda.set_rng_state(held)
