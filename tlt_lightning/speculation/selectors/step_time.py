"""Predict the seconds of an engine step from the batch, the draft length and the context.

Our own; the paper has none. The shape of the default prior was fitted to the step times of a 7B model on an H200 (worst
error 4%); its scale is taken from the first step seen.
"""

from collections.abc import Sequence
from math import sqrt
from typing import Any

import numpy as np

from tlt_lightning.speculation.strategy import Drafter, MeasuredStep, Strategy

KNEES = (64, 128, 256)
"""Verified tokens at which a step may start to cost more per token; a matrix unit fills up between them."""

TARGET_PRIOR = (1.0, 0.0002, 0.0005, 0.0002, 0.0027, 0.0014)
"""Coefficients of 1, batch, tokens, tokens beyond each knee; the cheapest plain step costs 1."""

TARGET_SPREAD = (0.6, 0.01, 0.01, 0.01, 0.01, 0.01)
"""Prior standard deviations of the same, wide enough for a CPU, where tokens cost from the first one on."""

CONTEXT_PRIOR, CONTEXT_SPREAD = 2.8e-6, 3e-6
"""Coefficient of the context tokens in the batch, whose keys and values are read, and its standard deviation."""

DRAFTER_PRIOR: dict[Drafter, tuple[float, ...]] = {
    "learned": (0.044, 0.0955, 0.0),
    "mixed": (0.054, 0.0955, 0.001),
    "ngram": (0.01, 0.0, 0.001),
    "sibling": (0.01, 0.0, 0.001),
}
"""Coefficients of 1, draft length, batch for each drafter; a look-up costs the host some microseconds a request."""

DRAFTER_SPREAD = (0.2, 0.2, 0.005)

NOISE = 0.1
"""Relative standard deviation of a single step's time around the model."""

LEAST_UNITS = 0.05
"""No step is cheaper: far from anything seen, negative costs can come out."""

MAX_SURPRISE = 3.0
"""Standard deviations beyond which a slow step counts no more than at this bound: pauses must not move the model.

Fast ones count in full, as nothing makes a step faster than it is: so a wrong cost is corrected within a probe.
"""


class StepTimeModel:
    """Predicts the seconds of a step, linear in a few features; every step seen corrects it.

    Recursive least squares on relative errors. Old steps are forgotten only in the direction of the new ones
    (Kulhavy's directional forgetting): what is known of long drafts survives an hour without them.

    Args:
        drafters: Whose steps it will see; each has a cost of its own.
        window: Steps after which a like step is forgotten.

    Example:
        >>> model = StepTimeModel(("learned",))
        >>> model.update(1, Strategy(0), 500.0, 0.005)
        >>> round(model.seconds(1, Strategy(0), 500.0), 4)
        0.005
    """

    def __init__(self, drafters: Sequence[Drafter], window: int = 300) -> None:
        self.drafters = tuple(drafters)
        self.keep = 1 - 1 / window
        self.scale = 0.0  # seconds of one unit of the prior; 0 until a step was seen
        priors, spreads = list(TARGET_PRIOR), list(TARGET_SPREAD)
        for drafter in drafters:
            priors += DRAFTER_PRIOR[drafter]
            spreads += DRAFTER_SPREAD
        spreads.append(CONTEXT_SPREAD)
        self._weights = np.array([*priors, CONTEXT_PRIOR])
        self._covariance = np.diag(np.square(spreads))
        self._features: dict[tuple[int, int, Drafter], np.ndarray] = {}
        self._tables: dict[tuple[int, tuple[Strategy, ...]], np.ndarray] = {}

    def features(self, batch_size: int, strategy: Strategy, mean_context: float) -> np.ndarray:
        """Return the features in which the cost is linear, (F,)."""
        key = batch_size, strategy.num_draft_tokens, strategy.drafter
        if key not in self._features:
            tokens = batch_size * (strategy.num_draft_tokens + 1)
            values = [1.0, batch_size, tokens, *(max(0, tokens - knee) for knee in KNEES)]
            for drafter in self.drafters:
                drafts = drafter == strategy.drafter and not strategy.is_off
                values += (1.0, strategy.num_draft_tokens, batch_size) if drafts else (0.0, 0.0, 0.0)
            self._features[key] = np.array([*values, 0.0])
        features = self._features[key].copy()
        features[-1] = batch_size * mean_context
        return features

    def seconds(self, batch_size: int, strategy: Strategy, mean_context: float) -> float:
        """Return a step's expected seconds; before any update, in plain steps at batch size 1."""
        return self._units(self.features(batch_size, strategy, mean_context)) * (self.scale or 1.0)

    def seconds_of_each(self, batch_size: int, strategies: tuple[Strategy, ...], mean_context: float) -> list[float]:
        """Return `seconds` for several strategies at once."""
        table = self._tables.get((batch_size, strategies))
        if table is None:
            table = np.stack([self.features(batch_size, strategy, 0.0) for strategy in strategies])
            self._tables[batch_size, strategies] = table
        units = table @ self._weights + self._weights[-1] * batch_size * mean_context
        return (np.maximum(units, LEAST_UNITS) * (self.scale or 1.0)).tolist()

    def estimate(self, batch_size: int, strategy: Strategy, mean_context: float) -> tuple[float, float]:
        """Return expected seconds of a step and their relative standard deviation, noise left out."""
        features = self.features(batch_size, strategy, mean_context)
        units = self._units(features)
        variance = float(features @ self._covariance @ features)
        return units * (self.scale or 1.0), sqrt(max(0.0, variance)) / units

    def update(
        self, batch_size: int, strategy: Strategy, mean_context: float, seconds: float, noise: float = NOISE
    ) -> None:
        """Learn from a step that took `seconds`, known up to the relative error `noise`.

        With features x of predicted cost c = w.x, covariance P and noise s, in relative units r = x / c::

            a = r.P.r / s^2                                 how much less is known of this step than it tells
            w += P r / (s^2 (1 + a)) * (seconds / c - 1)    Kalman's gain times the surprise, bounded above
            P -= P r r' P * b / (s^2 (1 + a b)),  b = keep - (1 - keep) / a

        b = 1 forgets nothing, and b < 0 where a step tells nothing new: P then grows, along r alone.
        """
        if not seconds > 0:
            raise ValueError(f"`seconds` of a step must be positive, got {seconds}.")
        features = self.features(batch_size, strategy, mean_context)
        predicted = self._units(features)
        if not self.scale:
            self.scale = seconds / predicted
        relative = features / predicted
        spread = self._covariance @ relative
        known = float(relative @ spread) / noise**2  # prior variance over noise variance
        bound = MAX_SURPRISE * noise * sqrt(1 + known)
        surprise = min(seconds / (self.scale * predicted) - 1, bound)
        self._weights += surprise / (noise**2 * (1 + known)) * spread
        if known > 0:
            gain = self.keep - (1 - self.keep) / known
            self._covariance -= np.multiply.outer(gain / (1 + gain * known) / noise**2 * spread, spread)

    def calibrate(self, steps: Sequence[MeasuredStep]) -> None:
        """Learn from steps measured on purpose."""
        for step in steps:
            self.update(step.batch_size, step.strategy, step.mean_context, step.seconds, step.error)

    def state_dict(self) -> dict[str, Any]:
        """Return everything learned."""
        return {"scale": self.scale, "weights": self._weights.tolist(), "covariance": self._covariance.tolist()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` saved."""
        self.scale = state_dict["scale"]
        self._weights = np.array(state_dict["weights"])
        self._covariance = np.array(state_dict["covariance"])

    def _units(self, features: np.ndarray) -> float:
        return max(float(self._weights @ features), LEAST_UNITS)
