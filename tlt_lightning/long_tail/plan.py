"""Hold what is decided about an iteration's training of the drafter, and what it came to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from tlt_lightning.long_tail.budget import MeasuredIteration


@dataclass(slots=True)
class DrafterPlan:
    """Holds one iteration's plan, the same on all ranks; a run that is resumed within the iteration keeps it.

    Args:
        iteration: Counted from 0; -1 before the first.
        share: The budget's share of the iteration's tokens; None rests.
        metrics: Metrics of the decision about publishing and of the budget.
        num_tokens: Tokens of all ranks' responses.
        num_trained: Tokens trained on in idle windows.
        started: When the iteration began in this process; None if it has not.
    """

    iteration: int = -1
    share: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    num_tokens: int = 0
    num_trained: int = 0
    started: float | None = None

    def is_of(self, iteration: int) -> bool:
        """Return True if this is the plan of `iteration`, and it has begun."""
        return self.started is not None and self.iteration == iteration

    def measured(self, metrics: Mapping[str, float], *, is_cold: bool) -> MeasuredIteration:
        """Read what the iteration took from its metrics, which are the same on all ranks."""
        num_tokens = max(self.num_tokens, 1)
        return MeasuredIteration(
            seconds=metrics["time/iteration"],
            decode_seconds=metrics.get("time/rollout", 0.0) + metrics.get("time/idle", 0.0),
            cost=metrics.get("time/drafter", 0.0),
            training_seconds=metrics.get("drafter/seconds_not_hidden", 0.0),
            share=(metrics.get("drafter/tokens", 0.0) - self.num_trained) / num_tokens,
            idle_share=self.num_trained / num_tokens,
            learned_share=None if is_cold else metrics.get("speculation/learned_share"),
        )

    def state_dict(self) -> dict[str, Any]:
        """Return everything but the clock, as primitives."""
        return {**asdict(self), "started": None}

    @classmethod
    def restore(cls, state: Mapping[str, Any]) -> DrafterPlan:
        """Return the plan that `state_dict` was of."""
        return cls(**{**state, "metrics": dict(state["metrics"])})
