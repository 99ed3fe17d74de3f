"""Forecast what training a drafter gains, from what it has gained.

A head falls short of what it could reach on the present policy by a `gap`, the logarithm of the ratio of their decode
seconds. Training on a share x of an iteration's tokens leaves exp(-speed * x) of the gap; after each iteration the
policy has moved on, and the gap grew by `drift`. None of the three is known: hypotheses on a grid are weighed by
how well they foretold the gains that were measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

_GAPS = (0.0, 0.03, 0.1, 0.3, 0.6, 1.0)
_SPEEDS = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
_DRIFTS = (0.0, 0.001, 0.003, 0.01, 0.03)
_LARGEST_GAP = 1.2  # no head is worse than none
_MEMORY = 0.97  # weight of all earlier evidence once there is new: nothing is learned for ever
_LEAST_ERROR = 0.01


class GainForecast:
    """Holds the weighted hypotheses, and plans the training that costs the least time in all."""

    def __init__(self) -> None:
        grid = np.meshgrid(_GAPS, _SPEEDS, _DRIFTS, indexing="ij")
        self._gaps, self._speed, self._drift = (axis.reshape(-1) for axis in grid)
        self.begin_anew()

    def begin_anew(self) -> None:
        """Forget all evidence."""
        self._gap, self._log_weight = self._gaps, np.zeros_like(self._gaps)
        self._foretold = np.zeros_like(self._gaps)  # gain since the last evidence

    @property
    def _weight(self) -> np.ndarray:
        weight = np.exp(self._log_weight - self._log_weight.max())
        return weight / weight.sum()

    def advance(self, share: float) -> None:
        """Move on by an iteration that trained on `share` of its tokens."""
        gain = self._gap * -np.expm1(-self._speed * share)
        self._foretold = self._foretold + gain
        self._gap = np.minimum(self._gap - gain + self._drift, _LARGEST_GAP)

    def observe(self, gain: float, error: float) -> float:
        """Weigh the hypotheses by the gain since the last `settle`, as measured now, and its standard error.

        Return the gain that the hypotheses expect with their new weights.
        """
        error = max(error, _LEAST_ERROR)
        misses = (gain - self._foretold) / np.hypot(error, 0.2 * self._foretold)  # the model is a model
        self._log_weight = _MEMORY * self._log_weight - 2.5 * np.log1p(misses**2 / 4)  # Student's, 4 degrees
        return float(self._weight @ self._foretold)

    def settle(self) -> None:
        """Count gains from here on: the trained weights are published, or thrown away."""
        self._foretold = np.zeros_like(self._gaps)

    def plan(
        self, shares: Sequence[float], costs: Sequence[float], decode_seconds: float, horizon: int
    ) -> tuple[float | None, float]:
        """Return the share to train on now, None to rest, and the seconds that the plan saves against rest.

        A plan trains on one share now, on another, no larger, for some iterations, and rests for the others. What a
        head has before it falls, so training pays most at first; it may be all that pays against drift later.

        Args:
            shares: Shares to choose among, the largest first.
            costs: Seconds that an iteration's training on each takes.
            decode_seconds: Seconds of decoding with the head, an iteration, as good as the head is now.
            horizon: Rollouts to come.
        """
        if not shares:
            return None, 0.0
        best_share: float | None = None
        best = baseline = float(self._weight @ self._resting(self._gap[:, None], horizon)[:, 0]) * decode_seconds
        now, later = np.triu_indices(len(shares))
        cost, spent = np.asarray(costs), np.zeros(len(now))
        gap, decoding = np.repeat(self._gap[:, None], len(now), 1), np.zeros((len(self._gap), len(now)))
        kept = np.exp(-self._speed[:, None] * np.asarray(shares))
        for number in range(1, horizon + 1):
            chosen = now if number == 1 else later
            gap = np.minimum(gap * kept[:, chosen] + self._drift[:, None], _LARGEST_GAP)
            decoding, spent = decoding + np.exp(gap - self._gap[:, None]), spent + cost[chosen]
            if number & (number - 1) == 0 or number == horizon:
                resting = self._resting(gap, horizon - number)
                seconds = self._weight @ (decoding + resting) * decode_seconds + spent
                cheapest = int(seconds.argmin())
                if seconds[cheapest] < best:
                    best_share, best = shares[now[cheapest]], float(seconds[cheapest])
        return best_share, baseline - best

    def _resting(self, gap: np.ndarray, number: int) -> np.ndarray:
        """Return the time of decoding in `number` iterations of rest, in iterations of now."""
        drift, now = np.maximum(self._drift, 1e-9)[:, None], self._gap[:, None]
        growth = np.expm1(drift * number) / -np.expm1(-drift)  # sum of exp(drift * k) for k from 1 to `number`
        return np.minimum(np.exp(gap - now) * growth, number * np.exp(_LARGEST_GAP - now))

    def state_dict(self) -> dict[str, Any]:
        """Return the hypotheses, as lists."""
        return {name: getattr(self, name).tolist() for name in ("_gap", "_log_weight", "_foretold")}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` saved."""
        for name, values in state_dict.items():
            setattr(self, name, np.asarray(values))
