"""Keep an engine's random numbers apart from those of the training process."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


class EngineRandom:
    """Holds random numbers for an engine that draws from the process's global generators.

    In force only while the engine works, so that rollouts and the draws of trainer, callbacks and consumers never mix.
    NumPy's generator is exchanged, not its state (0.1 us instead of 50): a normal number held in reserve is dropped.

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
        """Draw from these numbers in the block; restore the caller's, whatever happened."""
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
