"""What the drafter did in one iteration, as numbers for the logger."""

from __future__ import annotations

from dataclasses import dataclass, field

from tlt_lightning.long_tail.trainer import Burst, Decision


@dataclass(slots=True)
class DrafterBooks:
    """Collects an iteration's training and its decision.

    Args:
        serial: Training that the run paid for.
        idle: Training in idle windows.
        noted: Other metrics, by name.
    """

    serial: list[Burst] = field(default_factory=list)
    idle: list[Burst] = field(default_factory=list)
    noted: dict[str, float] = field(default_factory=dict)

    @property
    def micro_steps(self) -> int:
        """Packs trained on so far."""
        return sum(burst.micro_steps for burst in (*self.serial, *self.idle))

    def decided(self, decision: Decision) -> None:
        """Note a decision, and what the weights in force after it are worth."""
        self.noted |= {
            **decision.quality.metrics(),
            "drafter/acceptance_before": decision.before.acceptance_length,
            "drafter/acceptance_after": decision.after.acceptance_length,
            "drafter/published": float(decision.is_published),
        }

    def metrics(self, idle_seconds: float) -> dict[str, float]:
        """The iteration's metrics under the project's names.

        Args:
            idle_seconds: What the worker waited for others in all.
        """
        metrics = {
            **self.noted,
            "drafter/micro_steps": float(self.micro_steps),
            "drafter/idle_seconds_available": idle_seconds,
            "drafter/idle_seconds_used": sum(burst.seconds for burst in self.idle),
        }
        if self.micro_steps:
            loss = sum(burst.loss for burst in (*self.serial, *self.idle))
            metrics["drafter/loss"] = loss / self.micro_steps
        if overruns := [burst.overrun for burst in self.idle if burst.micro_steps]:
            metrics["drafter/preemption_ms"] = 1e3 * max(overruns)
        return metrics
