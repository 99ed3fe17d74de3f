"""An engine with a clock of its own that writes short answers under the real controller, by a head that is useless."""

from collections.abc import Generator
from types import SimpleNamespace

import pytest

from tlt_lightning.speculation import calibration
from tlt_lightning.speculation.controller import StepResult, StrategyController
from tlt_lightning.speculation.lookup import LEARNED
from tlt_lightning.speculation.strategy import OFF, SelectorState, Strategy, StrategySelector

NUM_REQUESTS, NUM_STEPS = 48, 15


class ShortAnswers:
    """Writes `NUM_REQUESTS` answers of `NUM_STEPS` tokens a rollout; no draft is ever accepted.

    Args:
        selector: Chooses the arms.
        plain: Seconds of a plain step.
        pass_cost: Plain steps that the head's first draft takes.
        draft_cost: Those of each draft.
        verify_cost: Those of verifying each.
        catch_up: Those of switching the head on.
    """

    def __init__(
        self,
        selector: StrategySelector,
        *,
        plain: float,
        pass_cost: float,
        draft_cost: float,
        verify_cost: float,
        catch_up: float,
    ) -> None:
        self.control = StrategyController(selector, steps_per_choice=2)
        self.plain, self.pass_cost, self.draft_cost = plain, pass_cost, draft_cost
        self.verify_cost, self.catch_up = verify_cost, catch_up
        self.now = 0.0
        self._drafted = OFF

    def step(self, verifies: Strategy, drafts: Strategy) -> float:
        """Let a step pass; return its seconds."""
        cost = 1 + self.verify_cost * verifies.num_draft_tokens
        if drafts.is_learned:
            cost += self.pass_cost + self.draft_cost * drafts.num_draft_tokens
            cost += 0.0 if self._drafted.is_learned else self.catch_up
        self._drafted = drafts
        self.now += self.plain * cost
        return self.plain * cost

    def calibrate(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Measure steps as an engine does before its first rollout."""
        dial = calibration.CalibrationSelector(lambda: 0)

        def decode(size: int) -> Generator[object, None, None]:
            before = OFF
            while True:
                strategy = dial.strategy
                seconds = self.step(before, strategy)
                if strategy == before:
                    dial.record(SelectorState(size, 20.0), strategy, (1,) * size, seconds)
                before = strategy
                yield

        selector = self.control.selector
        with monkeypatch.context() as clock:
            clock.setattr(calibration, "time", SimpleNamespace(perf_counter=lambda: self.now))
            sizes = calibration.batch_sizes(NUM_REQUESTS, 64)
            selector.calibrate(calibration.measure_steps(dial, decode, selector.arms, sizes))

    def rollout(self) -> float:
        """Write a rollout; return its seconds, as a multiple of what plain decoding takes."""
        self.control.begin_rollout()
        started, self._drafted = self.now, OFF
        for number in range(NUM_STEPS):
            plan = self.control.plan(NUM_REQUESTS, 20.0, 0)
            seconds = self.step(plan.verifies, plan.drafts)
            source = LEARNED if plan.verifies.is_learned else None
            self.control.finished(
                StepResult(
                    plan=plan,
                    num_drafted=[plan.verifies.num_draft_tokens] * NUM_REQUESTS,
                    num_emitted=[1] * NUM_REQUESTS,
                    sources=[source] * NUM_REQUESTS,
                    is_decode=number > 0,
                )
            )
            self.control.account(seconds)
        self.control.end_rollout()
        return (self.now - started) / (NUM_STEPS * self.plain)
