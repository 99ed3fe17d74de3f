"""Decide the strategy of every engine step, and learn from the steps. Pure: no vLLM."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from typing import Any

from tlt_lightning.ranks.engine_ranks import ALONE, EngineRanks
from tlt_lightning.speculation.alarm import AcceptanceAlarm
from tlt_lightning.speculation.counters import SpeculationCounters, arm_name
from tlt_lightning.speculation.lookup import LEARNED, LookupDraft, LookupDrafter, Source
from tlt_lightning.speculation.strategy import OFF, SelectorState, Strategy, StrategySelector

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Names the strategies under which an engine step verifies drafts and makes new ones.

    ::

        step n      drafts K=3  ------.
        step n + 1  drafts K=0, verifies K=3    two strategies share it: it teaches acceptance, and no time
        step n + 2  drafts K=0, verifies K=0    settled: it teaches what K=0 costs

    Args:
        state: What the selector saw; once the step is scheduled, with the requests that really run in it.
        verifies: The strategy of the step before, whose drafts it verifies.
        drafts: Its own. Where both are the same, its time tells what that strategy costs.
    """

    state: SelectorState
    verifies: Strategy
    drafts: Strategy

    def with_batch(self, batch_size: int) -> StepPlan:
        """Return the plan with the number of requests that really run in its step."""
        return replace(self, state=replace(self.state, batch_size=batch_size))


@dataclass(frozen=True, slots=True)
class StepResult:
    """Holds the outcome of an engine step.

    Args:
        num_drafted: Drafts verified, of each request that decoded.
        num_emitted: Tokens emitted by each of them, bonus token included.
        sources: Whose drafts each of them verified; None where there were none, or only fillers. Empty: none at all.
        is_decode: True if no request read its prompt in the step.
    """

    plan: StepPlan
    num_drafted: Sequence[int]
    num_emitted: Sequence[int]
    sources: Sequence[Source | None]
    is_decode: bool


@dataclass(eq=False)
class StrategyController:
    """Asks the selector for the strategy of each step and reports the step's outcome to it.

    A step drafts what the next one verifies, so after a change of strategy one step pays for both. It counts for
    acceptance, but its time teaches nothing; a choice is therefore kept for `steps_per_choice` steps. Arms of a head
    that is silenced, by the alarm or because it is cold, decode plainly, and such steps teach about off.

    Args:
        lookups: Looks drafts up; None without drafters that do.
        alarm: Silences the head when its acceptance collapses.
        is_cold: The head has no weights worth trying before the first `weights_changed` that names them.
        engine_ranks: The ranks that are the engine: the first one's selector chooses for all. Every rank's selector
            learns, by the rank's own clock, so that a run can be resumed with the ranks in other places.
        compute_dtype: Type that the engine computes in; what a selector learned of steps in another is not restored.
    """

    selector: StrategySelector
    _: KW_ONLY
    steps_per_choice: int = 2
    lookups: LookupDrafter | None = None
    alarm: AcceptanceAlarm = field(default_factory=AcceptanceAlarm)
    is_cold: bool = False
    engine_ranks: EngineRanks = ALONE
    compute_dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        self.drafter_version = self._restored_version = -1  # the latter of the head that a restored selector has seen
        self.counters = SpeculationCounters()
        self.strategy = OFF
        self._choice = OFF
        self._steps_left = 0
        self._result: StepResult | None = None
        self._seconds = self._paused = 0.0

    def begin_rollout(self) -> None:
        """Forget the counts of the last rollout; what was learned stays."""
        self.counters = SpeculationCounters()
        self._result, self._seconds, self._paused, self._steps_left = None, 0.0, 0.0, 0

    def end_rollout(self) -> None:
        """Forget the responses of the rollout."""
        if self.lookups is not None:
            self.lookups.clear()

    @property
    def is_silenced(self) -> bool:
        """True while the head must not draft: it is cold, or the alarm rings."""
        return self.is_cold or self.alarm.is_ringing

    def plan(self, batch_size: int, mean_context: float, waiting: int) -> StepPlan:
        """Decide what the next step to be scheduled drafts; O(1) beside the selector's own work."""
        is_silenced = self.is_silenced
        state = SelectorState(
            batch_size=batch_size,
            mean_context=mean_context,
            drafter_version=self.drafter_version,
            waiting=waiting,
            is_silenced=is_silenced,
            num_steps=self.steps_per_choice,
        )
        verifies = self.strategy
        if self._steps_left == 0:
            choice = self.engine_ranks.decide(partial(self.selector.select, state))
            self._choice = OFF if choice.is_off else choice
            self._steps_left = self.steps_per_choice
        self._steps_left -= 1
        self.strategy = OFF if is_silenced and self._choice.is_learned else self._choice
        self.counters.switches += self.strategy.is_off != verifies.is_off
        if self.lookups is not None:
            self.lookups.next_step()
        return StepPlan(state, verifies, self.strategy)

    def look_up(self, request_ids: Sequence[str], num_tokens: int) -> dict[str, LookupDraft]:
        """Look up drafts of at most `num_tokens` tokens, if the strategy in force looks up.

        A step of the head alone gets none, even if siblings know better: looking all requests up may cost more than
        the better drafts gain (`benchmarks/results/fixes.md`), so the selector has an arm for either.
        """
        if self.lookups is None or not self.strategy.looks_up:
            return {}
        drafts = ((name, self.lookups.propose(name, self.strategy, num_tokens)) for name in request_ids)
        return {name: draft for name, draft in drafts if draft is not None}

    def finished(self, result: StepResult) -> None:
        """Take the result of a step; the next step may look up before `account` brings the time."""
        self._result = result
        if self.lookups is not None:
            for source, emitted in zip(result.sources, result.num_emitted, strict=False):
                if source is not None:
                    self.lookups.scores.update(source, emitted - 1)

    def account(self, seconds: float, pause: float = 0.0) -> None:
        """Add an engine call's wall-clock seconds; learn from the step that it ends, if any.

        `pause` is the seconds since the call before, in which an asynchronous engine's step ran on; 0 for others. They
        are the step's own, unless they may have outlasted it: then its time teaches nothing.
        """
        self._seconds += seconds + pause
        self._paused += pause
        result, self._result = self._result, None
        if result is None:
            return
        is_timed = 2 * self._paused <= self._seconds
        seconds, self._seconds, self._paused = self._seconds, 0.0, 0.0
        self._learn(result, seconds if is_timed else None)

    def _learn(self, result: StepResult, seconds: float | None) -> None:
        plan = result.plan
        if result.num_emitted:
            self.counters.count_step(plan.verifies, result.num_drafted, result.num_emitted)
        kept = [n > 1 for source, n in zip(result.sources, result.num_emitted, strict=False) if source == LEARNED]
        if kept:
            self.alarm.observe(len(kept), sum(kept))
        if result.is_decode and result.num_emitted and plan.verifies == plan.drafts and seconds is not None:
            self.counters.count_time(plan.verifies, sum(result.num_emitted), seconds)
            self.selector.record(plan.state, plan.verifies, tuple(result.num_emitted), seconds)

    def weights_changed(self, drafter_version: int | None = None, accepted: Sequence[float] | None = None) -> None:
        """Reset the alarm for new weights: the policy's, or the head's with `drafter_version`.

        The selector is told of `accepted`, as by `note_head`, unless it has seen these weights, before a resume.
        """
        self.alarm.reset()
        if accepted is not None and drafter_version != self._restored_version:
            self.selector.note_head(accepted)
        if drafter_version is not None:
            self.drafter_version = drafter_version
            self.is_cold = False

    def stats(self) -> dict[str, float]:
        """Return the rollout's metrics so far; alarms are counted since the start."""
        return {
            **self.counters.stats(),
            "speculation/alarms": float(self.alarm.num_rung),
            "speculation/drafter_version": float(self.drafter_version),
        }

    @property
    def _learner(self) -> str:
        """Name the selector, its arms by batch and the engine's type: what is learned holds for these alone."""
        rows = dict.fromkeys(tuple(map(arm_name, self.selector.arms(2**power))) for power in range(11))
        return f"{type(self.selector).__name__} ({'; '.join(map(', '.join, rows))}) in {self.compute_dtype}"

    def state_dict(self) -> dict[str, Any]:
        """Return everything learned by this rank."""
        return {
            "selector": self.selector.state_dict(),
            "learner": self._learner,
            "alarms": self.alarm.num_rung,
            "drafter_version": self.drafter_version,
            "lookup_scores": None if self.lookups is None else self.lookups.scores.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` saved; a selector of another class, arms or type than the saved one starts anew."""
        if (saved := state_dict["learner"]) != self._learner:
            log.warning("The checkpoint holds what %s learned: %s starts anew.", saved, self._learner)
        else:
            self.selector.load_state_dict(state_dict["selector"])
            self._restored_version = state_dict["drafter_version"]
        self.alarm.num_rung = state_dict["alarms"]
        self.drafter_version = state_dict["drafter_version"]
        if self.lookups is not None and state_dict["lookup_scores"] is not None:
            self.lookups.scores.load_state_dict(state_dict["lookup_scores"])
