"""Estimate how many drafted tokens the target accepts, from the tokens emitted.

Our own; the paper's bandit needs no acceptance. A drafter that proposes fewer tokens than it was asked for, as a
look-up without a match does, simply has a lower acceptance.
"""

from collections.abc import Sequence
from itertools import pairwise
from math import sqrt
from typing import Any

from tlt_lightning.arguments import Count, checked

PRIOR, PRIOR_STRENGTH = 0.6, 4.0
"""Chance assumed at the first position before anything was tried, and the observations that it is worth."""


class AcceptanceEstimator:
    """Estimates each position's chance of acceptance, given that the drafts before it were.

    A position never tried is taken to be like the one before it, and one no longer tried to change like the last one
    that is. Forgetting leaves the estimate of what is no longer tried alone and makes it less certain: a drafter that
    was switched off is not thought better of with time.

    Args:
        longest_draft: Tokens of the longest draft.
        window: Steps after which an observation is forgotten.

    Example:
        >>> estimator = AcceptanceEstimator(longest_draft=3)
        >>> for _ in range(100):
        ...     estimator.update(2, (3, 3, 1, 2))
        >>> [round(estimator.probability(position), 1) for position in (1, 2, 3)]
        [0.7, 0.7, 0.7]
    """

    @checked()
    def __init__(self, longest_draft: Count, window: Count = 100) -> None:
        self.keep = 1 - 1 / window
        self._means = [PRIOR] * longest_draft
        self._counts = [0.0] * longest_draft  # observations still remembered
        self._seen = [0.0] * longest_draft  # all observations
        self._cache: dict[float, tuple[list[float], list[float]]] = {}

    def update(self, num_draft_tokens: int, num_emitted: tuple[int, ...]) -> None:
        """Learn from requests asked to verify `num_draft_tokens` each, which emitted `num_emitted`.

        With 0 nothing was tried. At each position, of n requests that reached it, a of them accepted, and a count c of
        those remembered::

            c = keep * c + n,    mean += (a - n * mean) / (c + prior strength)
        """
        reached, shift = len(num_emitted), 0.0
        for index in range(len(self._means)):
            self._counts[index] *= self.keep
            if index < num_draft_tokens and reached:
                accepted = reached - num_emitted.count(index + 1)
                self._counts[index] += reached
                self._seen[index] += reached
                shift = (accepted - reached * self._means[index]) / (self._counts[index] + PRIOR_STRENGTH)
                reached = accepted
            self._means[index] = min(max(self._means[index] + shift, 0.0), 1.0)
        self._cache.clear()

    def doubt(self) -> None:
        """Keep the estimates but know them as little as the prior: the drafter has changed."""
        self._counts = [0.0] * len(self._counts)
        self._cache.clear()

    def expect(self, accepted: Sequence[float]) -> None:
        """Take over what was measured: how often the k-th draft and all before it are accepted.

        Fewer texts have later drafts, so that a share may be larger than the one before it.
        """
        for index, (before, now) in enumerate(pairwise([1.0, *accepted[: len(self._means)]])):
            self._means[index] = min(1.0, now / before) if before else 0.0
            self._seen[index] = max(self._seen[index], 10 * PRIOR_STRENGTH)
        self._cache.clear()

    def probability(self, position: int, spread: float = 0.0) -> float:
        """Return the chance at `position` (from 1) plus `spread` standard deviations, at most 1."""
        return self._tables(spread)[0][position - 1]

    def expected_emitted(self, num_draft_tokens: int, spread: float = 0.0) -> float:
        """Return expected tokens per request and step, with bonus; `spread` as in `probability`."""
        return self._tables(spread)[1][num_draft_tokens]

    def _tables(self, spread: float) -> tuple[list[float], list[float]]:
        """Return the chance at each position, and expected tokens for each draft length from 0."""
        if spread not in self._cache:
            chances: list[float] = []
            expected = [1.0]
            mean, reach = self._means[0], 1.0
            for tried, seen, count in zip(self._means, self._seen, self._counts, strict=True):
                mean = (seen * tried + PRIOR_STRENGTH * mean) / (seen + PRIOR_STRENGTH)
                count += PRIOR_STRENGTH
                # The last term keeps a chance of 0 or 1 uncertain while little is known of it.
                chance = min(1.0, mean + spread * sqrt((mean * (1 - mean) + 1 / count) / count))
                reach *= chance
                chances.append(chance)
                expected.append(expected[-1] + reach)
            self._cache[spread] = chances, expected
        return self._cache[spread]

    def state_dict(self) -> dict[str, Any]:
        """Return everything learned."""
        return {"means": list(self._means), "counts": list(self._counts), "seen": list(self._seen)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` saved."""
        self._means, self._counts = list(state_dict["means"]), list(state_dict["counts"])
        self._seen = list(state_dict["seen"])
        self._cache.clear()
