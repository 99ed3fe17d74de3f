"""Hold what is decided about an iteration's training of the drafter, and what it came to."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from tlt_lightning.long_tail.budget import MeasuredIteration
from tlt_lightning.metrics import IterationLog


@dataclass(slots=True)
class Plan:
    """Holds one iteration's plan, the same on all workers; a run that is resumed within the iteration keeps it.

    Args:
        iteration: Counted from 0; -1 before the first.
        share: The budget's share of the iteration's tokens; None rests.
        metrics: Of the decision about publishing and of the budget.
        num_tokens: Tokens of all workers' responses.
        num_trained: Tokens trained on in idle windows.
    """

    iteration: int = -1
    share: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    num_tokens: int = 0
    num_trained: int = 0

    def measured(self, metrics: Mapping[str, float], *, is_cold: bool) -> MeasuredIteration:
        """Read what the iteration took from its metrics, which are the same on all workers."""
        num_tokens = max(self.num_tokens, 1)
        return MeasuredIteration(
            seconds=metrics["time/iteration"],
            decode_seconds=metrics.get("time/rollout", 0.0) + metrics.get("time/idle", 0.0),
            cost=metrics.get("time/drafter", 0.0),
            training_seconds=metrics.get("drafter/seconds_not_hidden", 0.0),
            share=(metrics.get("drafter/tokens", 0.0) - self.num_trained) / num_tokens,
            idle_share=self.num_trained / num_tokens,
            learned_share=None if is_cold else metrics.get("speculation/learned_share"),
            acceptance=metrics.get("speculation/acceptance_length", 1.0),
        )

    def state_dict(self) -> dict[str, Any]:
        """Return everything as primitives."""
        return asdict(self)

    @classmethod
    def restore(cls, state: Mapping[str, Any]) -> Plan:
        """Return the plan that `state_dict` was of."""
        return cls(**{**state, "metrics": dict(state["metrics"])})


@dataclass(slots=True)
class Burst:
    """Counts losses, seconds and packs without memory of one stretch of training.

    `overrun` is the seconds since training was last seen to be welcome: an upper bound on how late it stopped.
    """

    losses: list[float] = field(default_factory=list)
    seconds: float = 0.0
    overrun: float = 0.0
    num_out_of_memory: int = 0

    def write(self, iteration_log: IterationLog) -> None:
        """Log how many losses there are, and those that are numbers: the others' steps were left out."""
        iteration_log.sum("drafter/micro_steps", len(self.losses))
        for loss in filter(math.isfinite, self.losses):
            iteration_log.mean("drafter/loss", loss)
        if self.num_out_of_memory:
            iteration_log.sum("drafter/out_of_memory", self.num_out_of_memory)
