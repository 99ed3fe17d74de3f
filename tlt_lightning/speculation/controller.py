"""Which strategy each engine step follows, and what is learned from it. Pure: knows nothing of vLLM."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tlt_lightning.speculation.alarm import AcceptanceAlarm
from tlt_lightning.speculation.counters import SpeculationCounters, arm_name
from tlt_lightning.speculation.strategy import OFF, SelectorState, Strategy, StrategySelector
from tlt_lightning.speculation.trace import StepTrace


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What was decided before an engine step.

    Args:
        state: What the selector saw.
        verifies: The strategy whose drafts, proposed at the end of the step before, are verified in this step.
        drafts: The strategy under which this step drafts for the next.
        credits: The selector's choice that the step's outcome is credited to; None if two choices share the step. It
            differs from `verifies` only while the learned drafter is kept off: by the alarm, or because it is cold.
    """

    state: SelectorState
    verifies: Strategy
    drafts: Strategy
    credits: Strategy | None


@dataclass(frozen=True, slots=True)
class StepResult:
    """What came out of an engine step.

    Args:
        plan: What had been decided before it.
        num_drafted: Drafts verified, of each request that decoded.
        num_emitted: Tokens emitted by each of them, bonus token included.
        num_learned: Requests whose drafts were the learned drafter's, and how many of these kept the first draft.
        is_decode: True if no request read its prompt in the step.
        running: Requests left running.
        waiting: Requests left waiting.
    """

    plan: StepPlan
    num_drafted: Sequence[int]
    num_emitted: Sequence[int]
    num_learned: tuple[int, int]
    is_decode: bool
    running: int
    waiting: int


class SpeculationControl:
    """Asks the selector before each step and tells it what the step achieved.

    A step drafts what the next one verifies, so one that follows a change of strategy pays for the drafts of one and
    the verification of another. Such steps count for acceptance, and their times teach the selector nothing; a choice
    is therefore kept for `steps_per_choice` steps.

    Args:
        selector: Chooses.
        steps_per_choice: Steps for which a choice stands.
        alarm: Switches the learned drafter off when its acceptance collapses.
        trace: Takes one row a step; None keeps none.
        is_cold: The learned drafter has no weights worth trying before the first `weights_changed` that names them.
    """

    def __init__(
        self,
        selector: StrategySelector,
        *,
        steps_per_choice: int = 2,
        alarm: AcceptanceAlarm | None = None,
        trace: StepTrace | None = None,
        is_cold: bool = False,
    ) -> None:
        self.selector = selector
        self.steps_per_choice = steps_per_choice
        self.alarm = alarm or AcceptanceAlarm()
        self.trace = trace
        self.is_cold = is_cold
        self.drafter_version = -1
        self.counters = SpeculationCounters()
        self.strategy = OFF
        self._choice = OFF
        self._steps_left = 0
        self._result: StepResult | None = None
        self._seconds = 0.0
        self._started = time.perf_counter()

    def begin_rollout(self) -> None:
        """Forget the counts of the last rollout; what the selector has learned stays."""
        self.counters = SpeculationCounters()
        self._result, self._seconds, self._steps_left = None, 0.0, 0
        self._started = time.perf_counter()
        if self.trace is not None:
            self.trace.begin_rollout()

    def plan(self, batch_size: int, mean_context: float, waiting: int) -> StepPlan:
        """Decide what the step that is about to be scheduled drafts; O(1) beside the selector's own work."""
        state = SelectorState(
            batch_size=batch_size,
            mean_context=mean_context,
            drafter_version=self.drafter_version,
            waiting=waiting,
            is_cold=self.is_cold,
        )
        verifies, last_choice = self.strategy, self._choice
        if self._steps_left == 0:
            choice = self.selector.select(state)
            self._choice = OFF if choice.is_off else choice
            self._steps_left = self.steps_per_choice
        self._steps_left -= 1
        is_silenced = (self.alarm.is_ringing or self.is_cold) and self._choice.is_learned
        self.strategy = OFF if is_silenced else self._choice
        self.counters.switches += self.strategy.is_off != verifies.is_off
        is_settled = self.strategy == verifies and self._choice == last_choice
        return StepPlan(state, verifies, self.strategy, self._choice if is_settled else None)

    def finished(self, result: StepResult) -> None:
        """Take the result of a step; its time follows with `account`."""
        self._result = result

    def account(self, seconds: float) -> None:
        """Add the wall-clock seconds of a call of the engine; learn from the step that finished in it, if one did."""
        self._seconds += seconds
        result, self._result = self._result, None
        if result is None:
            return
        seconds, self._seconds = self._seconds, 0.0
        self._learn(result, seconds)
        if self.trace is not None:
            self.trace.write(self._row(result, seconds))

    def _learn(self, result: StepResult, seconds: float) -> None:
        plan = result.plan
        if result.num_emitted:
            self.counters.count_step(plan.verifies, result.num_drafted, result.num_emitted)
        if result.num_learned[0]:
            self.alarm.observe(*result.num_learned)
        if result.is_decode and result.num_emitted and plan.credits is not None:
            self.counters.count_time(plan.verifies, sum(result.num_emitted), seconds)
            self.selector.record(plan.state, plan.credits, tuple(result.num_emitted), seconds)

    def _row(self, result: StepResult, seconds: float) -> dict[str, Any]:
        drafted, emitted = sum(result.num_drafted), sum(result.num_emitted)
        verifications = [d for d in result.num_drafted if d > 0]
        accepted = sum(e - 1 for d, e in zip(result.num_drafted, result.num_emitted, strict=True) if d > 0)
        return {
            "time": round(time.perf_counter() - self._started, 6),
            "seconds": round(seconds, 6),
            "batch": result.plan.state.batch_size,
            "context": round(result.plan.state.mean_context, 1),
            "running": result.running,
            "waiting": result.waiting,
            "verifies": arm_name(result.plan.verifies),
            "drafts": arm_name(result.plan.drafts),
            "k": result.plan.verifies.num_draft_tokens,
            "verifications": len(verifications),
            "drafted": drafted,
            "accepted": accepted,
            "emitted": emitted,
            "decode": result.is_decode,
        }

    def weights_changed(self, drafter_version: int | None = None) -> None:
        """The policy's or the drafter's weights have changed: a drafter that was switched off is tried again."""
        self.alarm.reset()
        if drafter_version is not None:
            self.drafter_version = drafter_version
            self.is_cold = False

    def stats(self) -> dict[str, float]:
        """Metrics of the rollout so far; alarms are counted since the start."""
        return {
            **self.counters.stats(),
            "speculation/alarms": float(self.alarm.num_rung),
            "speculation/drafter_version": float(self.drafter_version),
        }
