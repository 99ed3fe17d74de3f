"""Hand the decision about trained weights to the log and to the budget."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from tlt_lightning.drafter.quality import DraftQuality


@dataclass(frozen=True, slots=True)
class Publication:
    """Holds the gain of training since the last decision about publishing, and this decision.

    Args:
        before: Quality of the published weights on held-out text of now.
        after: Quality of the trained weights on the same text.
        gain: Tokens per engine step that the trained weights gain, on all pooled text.
        bound: Lower bound of that gain, 90% certain; minus infinity with a single text.
        is_published: True if the trained weights are in force from now on.
        has_diverged: True if training starts over from the published weights.
    """

    before: DraftQuality
    after: DraftQuality
    gain: float
    bound: float
    is_published: bool
    has_diverged: bool

    @property
    def quality(self) -> DraftQuality:
        """Quality of the weights in force."""
        return self.after if self.is_published else self.before

    def metrics(self) -> dict[str, float]:
        """Return the numbers under the loggers' names."""
        metrics = {
            **self.quality.metrics(),
            "drafter/acceptance_before": self.before.acceptance_length,
            "drafter/acceptance_after": self.after.acceptance_length,
            "drafter/acceptance_gain": self.gain,
            "drafter/published": float(self.is_published),
            "drafter/started_over": float(self.has_diverged),
        }
        return metrics if self.bound == -inf else {**metrics, "drafter/acceptance_gain_bound": self.bound}
