"""Choose arms by predicted tokens per second, without trying each at every batch size.

Our own. The prediction is expected tokens over expected seconds. What is unknown is tried out in short probes. A small
share of all seconds pays for them: for their predicted loss before, and afterwards for what they took beyond it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from typing_extensions import override

from tlt_lightning.arguments import Bound, Count, Share, checked
from tlt_lightning.speculation.selectors.acceptance import AcceptanceEstimator
from tlt_lightning.speculation.selectors.step_time import NOISE, StepTimeModel
from tlt_lightning.speculation.strategy import (
    LEARNED_DRAFTERS,
    OFF,
    Drafter,
    MeasuredStep,
    SelectorState,
    Strategy,
    StrategySelector,
    make_arms,
)

PROBE_STEPS = 8
"""Steps of one probe, and between two decisions whether to probe: enough to see a rejection rate, and cheap."""

CHECK_STEPS = 2
"""Steps of a probe where the budget cannot pay for a whole one: enough to see that an arm is faster than believed."""

DOUBT_STEPS = 4
"""Plain steps of unspent budget that widen the uncertainty by one standard deviation."""

SETTLING_STEPS = 2
"""Steps after a learned drafter was switched on whose excess time is its catch-up; asynchronous engines pay it late."""

MOST_EXCESS = 2.0
"""Most that counts of a step's excess time, as a multiple of the expected time: more is a pause."""

BATCH_SIZES = (1, 4, 16, 64)
"""Batch sizes at which a head has to pay to be published: it pays in small ones, if in any."""

ACCEPTANCE_WINDOW = 50
"""Steps after which an acceptance is forgotten."""

CATCH_UP_STEPS = 200
"""Steps over which a catch-up must pay off."""

CATCH_UP_GAIN = 0.3
"""Weight of the newest catch-up in the running mean."""


@checked()
@dataclass(eq=False)
class CostModelSelector(StrategySelector):
    """Chooses the arm with the most expected tokens per second; the default selector.

    Wants the seconds of some steps before its first rollout (`calibrate`); `VLLMEngine` measures them.

    Args:
        num_draft_tokens: Draft lengths to choose among besides off.
        drafters: Who may propose; every draft length is an arm with each of them.
        max_batch_tokens: Draft lengths are arms only where batch size times (draft length + 1) is at most this: beyond
            it verification is compute-bound, and graphs for it would be captured in vain.
        exploration: Share of the time that probes may cost.
        margin: An arm must promise this much more than the one in force to replace it.
        catch_up_seconds: First guess of what switching a learned drafter back on costs; measured from then on.

    Example:
        >>> selector = CostModelSelector(num_draft_tokens=(1, 3))
        >>> state = SelectorState(batch_size=4, mean_context=500.0)
        >>> arm = selector.select(state)
        >>> selector.record(state, arm, num_emitted=(1, 2, 1, 1), seconds=0.005)
    """

    num_draft_tokens: tuple[int, ...] = (1, 3, 5, 7)
    drafters: tuple[Drafter, ...] = ("learned",)
    max_batch_tokens: Count = 512
    exploration: Share = 0.01
    margin: Share = 0.02
    catch_up_seconds: Annotated[float, Bound(0)] = 0.01

    def __post_init__(self) -> None:
        self._all_arms = make_arms(self.num_draft_tokens, self.drafters)
        self.step_time = StepTimeModel(self.drafters)
        self.acceptance = {
            drafter: AcceptanceEstimator(max(self.num_draft_tokens), ACCEPTANCE_WINDOW) for drafter in self.drafters
        }
        self._current = OFF
        self._drafter_version: int | None = None
        self._is_warm = True  # the learned drafter has seen all tokens
        self._settling = 0
        self._excess = 0.0
        self._is_probing = False
        self._until_decision = 0
        self._credit = 0.0  # seconds that probes may still cost

    @override
    def arms(self, batch_size: int) -> tuple[Strategy, ...]:
        longest = max(self.max_batch_tokens // max(batch_size, 1) - 1, 0)
        return tuple(arm for arm in self._all_arms if arm.num_draft_tokens <= longest)

    @property
    @override
    def wants_calibration(self) -> bool:
        return not self.step_time.scale

    @override
    def calibrate(self, steps: Sequence[MeasuredStep]) -> None:
        """Learn from measured steps; without any, the model starts from a 7B on an H200."""
        self.step_time.calibrate(steps)

    @override
    def note_head(self, accepted: Sequence[float]) -> None:
        for acceptance in self._heads:  # mixed with look-ups, it drafts at least as well
            acceptance.expect(accepted)

    @override
    def expected_speedup(self, accepted: Sequence[float]) -> float | None:
        if not self.step_time.scale:
            return None
        speedups = [0.0]
        for size in BATCH_SIZES:
            plain = self.step_time.seconds(size, OFF, 0.0)
            for arm in self.arms(size):
                if arm.is_learned:
                    seconds, error = self.step_time.estimate(size, arm, 0.0)
                    emitted = 1 + sum(accepted[: arm.num_draft_tokens])
                    speedups.append(emitted * plain / seconds * (1 + error))
        return max(speedups)

    def expected_rates(self, state: SelectorState) -> dict[Strategy, float]:
        """Return expected tokens per second and request of each arm, cost of switching included."""
        rates, arms = {}, self.arms(state.batch_size)
        for arm, seconds in zip(
            arms, self.step_time.seconds_of_each(state.batch_size, arms, state.mean_context), strict=True
        ):
            if not (state.is_silenced and arm.is_learned):
                rates[arm] = self._emitted(arm) / (seconds + self._switch_seconds(arm) / CATCH_UP_STEPS)
        return rates

    @override
    def select(self, state: SelectorState) -> Strategy:
        if not self.step_time.scale:
            return OFF  # what other steps cost is in units of plain ones, of which none was seen
        rates = self.expected_rates(state)
        if state.drafter_version != self._drafter_version:
            if self._drafter_version is not None:
                for acceptance in self._heads:  # a new one is like the old one, or as it was measured, less surely
                    acceptance.doubt()
            self._drafter_version = state.drafter_version
        self._until_decision -= state.num_steps
        if self._is_probing and self._until_decision >= 0 and self._current in rates:
            return self._current
        held = rates.get(self._current, 0.0) * (1 + self.margin)
        best = max(rates, key=lambda arm: held if arm == self._current else rates[arm])
        self._is_probing = False
        if self._until_decision < 0:
            self._until_decision = PROBE_STEPS - state.num_steps
            for num_steps in (PROBE_STEPS, CHECK_STEPS):
                probe = self._worth_probing(state, rates, best, num_steps)
                if probe is not None:
                    best, self._is_probing, self._until_decision = probe, True, num_steps - state.num_steps
                    break
        self._switch_to(best)
        return best

    @override
    def record(self, state: SelectorState, strategy: Strategy, num_emitted: tuple[int, ...], seconds: float) -> None:
        self._credit += self.exploration * seconds
        expected = self.step_time.seconds(state.batch_size, strategy, state.mean_context)
        excess = seconds - expected
        if not self._settling or excess < 0:  # faster than believed in spite of a catch-up
            self.step_time.update(state.batch_size, strategy, state.mean_context, seconds)
        if self._is_probing and strategy == self._current:
            self._charge_probe(excess, expected, state.num_steps)
        if self._settling:
            self._settle(excess)
        for drafter, acceptance in self.acceptance.items():
            acceptance.update(strategy.num_draft_tokens if drafter == strategy.drafter else 0, num_emitted)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {
            "step_time": self.step_time.state_dict(),
            "acceptance": {drafter: acceptance.state_dict() for drafter, acceptance in self.acceptance.items()},
            "catch_up_seconds": self.catch_up_seconds,
            "current": [self._current.num_draft_tokens, self._current.drafter],
            "drafter_version": self._drafter_version,
            "is_warm": self._is_warm,
            "settling": [self._settling, self._excess],
            "probe": [self._is_probing, self._until_decision, self._credit],
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step_time.load_state_dict(state_dict["step_time"])
        for drafter, acceptance in self.acceptance.items():
            acceptance.load_state_dict(state_dict["acceptance"][drafter])
        self.catch_up_seconds = state_dict["catch_up_seconds"]
        self._current = Strategy(*state_dict["current"])
        self._drafter_version = state_dict["drafter_version"]
        self._is_warm = state_dict["is_warm"]
        self._settling, self._excess = state_dict["settling"]
        self._is_probing, self._until_decision, self._credit = state_dict["probe"]

    def _emitted(self, arm: Strategy, spread: float = 0.0) -> float:
        if arm.is_off:
            return 1.0
        return self.acceptance[arm.drafter].expected_emitted(arm.num_draft_tokens, spread)

    @property
    def _heads(self) -> list[AcceptanceEstimator]:
        return [self.acceptance[name] for name in LEARNED_DRAFTERS if name in self.acceptance]

    def _switch_seconds(self, arm: Strategy) -> float:
        return 0.0 if self._is_warm or not arm.is_learned else self.catch_up_seconds

    def _switch_to(self, arm: Strategy) -> None:
        if arm.is_learned and not self._is_warm:
            self._settling, self._excess = SETTLING_STEPS, 0.0
        self._is_warm = arm.is_learned
        self._current = arm

    def _charge_probe(self, excess: float, expected: float, num_steps: int) -> None:
        """Charge what a probe's step took beyond its price; end a probe that is twice as slow as believed.

        The step stands for those around it that are of two strategies, and are not seen.
        """
        if self._settling == SETTLING_STEPS:
            excess -= self.catch_up_seconds
        self._credit -= min(max(0.0, excess - NOISE * expected), MOST_EXCESS * expected) * num_steps
        if excess > expected and not self._settling:
            self._until_decision = 0

    def _settle(self, excess: float) -> None:
        """Learn the catch-up's cost: seconds beyond the model's of the first steps after a switch."""
        self._excess += excess
        self._settling -= 1
        if not self._settling:
            self.catch_up_seconds += CATCH_UP_GAIN * (max(0.0, self._excess) - self.catch_up_seconds)

    def _worth_probing(
        self, state: SelectorState, rates: dict[Strategy, float], best: Strategy, num_steps: int
    ) -> Strategy | None:
        """Return the arm that may beat `best` by most, if the budget can pay for `num_steps` of it; pay."""
        num_steps += state.num_steps > 1  # the two around the probe are of two strategies each: one more, together
        # The longer nothing was worth its price, the more we doubt, so a model that is sure and wrong is found out.
        doubt = 1 + max(0.0, self._credit) * rates[best] / DOUBT_STEPS
        found, most, price = None, rates[best] * (1 + self.margin), 0.0
        for arm, rate in rates.items():
            seconds, spread = self.step_time.estimate(state.batch_size, arm, state.mean_context)
            hoped = self._emitted(arm, doubt) / seconds * (1 + doubt * spread)
            cost = num_steps * seconds * max(0.0, 1 - rate / rates[best]) + self._switch_seconds(arm)
            if self._is_warm and not arm.is_learned:
                cost += self.catch_up_seconds  # to come back
            if arm != best and hoped > most and cost <= self._credit:
                found, most, price = arm, hoped, cost
        self._credit -= price
        return found
