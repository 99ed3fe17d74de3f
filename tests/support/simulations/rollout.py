"""Simulate a rollout of known costs and acceptance with a long tail, to compare selectors.

Two selectors that are given the same workload see the same lengths and, token by token, the same luck in drafting, so
their makespans differ by their choices and by nothing else. Makespans are counted without the noise that selectors see.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from tlt_lightning.speculation.strategy import Drafter, SelectorState, Strategy, StrategySelector

AcceptanceProfile = Callable[[float], Sequence[float]]
"""Chances at each draft position, given how much of the longest response is written, in [0, 1]."""


@dataclass(frozen=True, kw_only=True)
class StepCosts:
    """Interpolates seconds per engine step in a table of measured ones.

    The default is a 7B model with an EAGLE-3 head on one H200 under vLLM 0.32, contexts of about 350 tokens. Beyond the
    table its last slope goes on.

    Args:
        batch_sizes: Rows of the table.
        plain: Milliseconds of a plain step at each batch size.
        num_draft_tokens: Columns of the table.
        speculative: Milliseconds of a step that verifies and drafts, one row per batch size.
        draft_fixed: Milliseconds of them for the learned drafter's first pass; look-ups have none.
        draft_token: Milliseconds of them for each further draft token; look-ups have none.
        context_token: Milliseconds for each token of context in the batch beyond `table_context` a request.
        table_context: Mean context at which the table was measured.
        catch_up_fixed: Milliseconds of switching the learned drafter on after other steps.
        catch_up_token: Milliseconds for each token that it missed.
    """

    batch_sizes: tuple[int, ...] = (1, 8, 32, 64, 128)
    plain: tuple[float, ...] = (4.66, 4.77, 4.94, 5.13, 5.64)
    num_draft_tokens: tuple[int, ...] = (1, 3, 5, 7)
    speculative: tuple[tuple[float, ...], ...] = (
        (5.24, 6.17, 7.11, 8.01),
        (5.40, 6.40, 7.35, 8.22),
        (5.54, 6.75, 8.98, 10.23),
        (6.03, 8.99, 12.76, 16.19),
        (8.61, 15.22, 22.45, 28.59),
    )
    draft_fixed: float = 0.5
    draft_token: float = 0.45
    context_token: float = 1.3e-5  # 57 kB of keys and values at 4.3 TB/s
    table_context: float = 350.0
    catch_up_fixed: float = 0.5
    catch_up_token: float = 0.001

    def step(self, batch_size: int, strategy: Strategy, mean_context: float) -> float:
        """Return the seconds of a step."""
        length = strategy.num_draft_tokens
        if strategy.is_off:
            cost = interpolate(self.batch_sizes, self.plain, batch_size)
        else:
            row = [interpolate(self.num_draft_tokens, values, length) for values in self.speculative]
            cost = interpolate(self.batch_sizes, row, batch_size)
            if not strategy.is_learned:
                cost -= self.draft_fixed + self.draft_token * (length - 1)
        return (cost + self.context_token * batch_size * max(0.0, mean_context - self.table_context)) / 1000

    def catch_up(self, num_missed: int) -> float:
        """Return the seconds of the head's catch-up after `num_missed` tokens."""
        return (self.catch_up_fixed + self.catch_up_token * num_missed) / 1000 if num_missed else 0.0


def interpolate(points: Sequence[float], values: Sequence[float], point: float) -> float:
    """Interpolate (`points`, `values`) linearly, with the first and last slope beyond them."""
    right = min(max(bisect_right(points, point), 1), len(points) - 1)
    slope = (values[right] - values[right - 1]) / (points[right] - points[right - 1])
    return values[right - 1] + slope * (point - points[right - 1])


def constant(*chances: float) -> AcceptanceProfile:
    """Return the same chances throughout; positions beyond the last are like the last."""
    return lambda progress: chances


def change(before: AcceptanceProfile, after: AcceptanceProfile, start: float, end: float) -> AcceptanceProfile:
    """Mix `before` into `after` linearly from `start` to `end`; a collapse if they are equal."""

    def profile(progress: float) -> Sequence[float]:
        share = float(progress >= end) if end <= start else min(max((progress - start) / (end - start), 0.0), 1.0)
        return [(1 - share) * a + share * b for a, b in zip(before(progress), after(progress), strict=True)]

    return profile


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Sets the number, lengths and acceptance of the responses.

    Args:
        acceptance: Profile of each drafter that may be asked.
        num_requests: Responses to write; all of them start at once.
        median_length: Median response in tokens.
        sigma: Spread of the log-normal lengths; 1.1 is what reasoning models show.
        max_length: Longest response.
        prompt_length: Tokens of each prompt.
        noise: Relative standard deviation of the step times that selectors see.
        pause_share: Share of steps with a pause of 10 ms, which selectors see too.
        seed: Of lengths, luck and noise.
        recorded: Lengths to take instead of drawing them.
    """

    acceptance: Mapping[Drafter, AcceptanceProfile]
    num_requests: int = 128
    median_length: float = 600.0
    sigma: float = 1.1
    max_length: int = 8192
    prompt_length: int = 200
    noise: float = 0.02
    pause_share: float = 0.002
    seed: int = 0
    recorded: tuple[int, ...] = ()

    def lengths(self) -> np.ndarray:
        """Return the tokens of each response, (num_requests,) int64."""
        if self.recorded:
            return np.array(self.recorded, dtype=np.int64)
        normal = np.random.default_rng(self.seed).standard_normal(self.num_requests)
        lengths = self.median_length * np.exp(self.sigma * normal)
        return np.clip(np.ceil(lengths), 1, self.max_length).astype(np.int64)


@dataclass(frozen=True, slots=True)
class Step:
    """Holds a simulated step: requests, strategy, tokens, true seconds with catch-up."""

    batch_size: int
    strategy: Strategy
    num_tokens: int
    seconds: float


@dataclass(slots=True)
class Outcome:
    """Holds the result of a rollout: tokens written, seconds, and its steps in order."""

    tokens: int = 0
    makespan: float = 0.0
    trace: list[Step] = field(default_factory=list)


class RolloutSimulator:
    """Rolls out a workload under a selector, again with another one after each `run`.

    Args:
        workload: Responses to roll out.
        costs: Seconds of engine steps.

    Example:
        >>> workload = Workload(acceptance={"learned": constant(0.8)}, num_requests=4, max_length=64)
        >>> from tlt_lightning.speculation.selectors.rules import FixedSelector
        >>> simulator = RolloutSimulator(workload, StepCosts())
        >>> simulator.run(FixedSelector(3)).makespan < simulator.run(FixedSelector(0)).makespan
        True
    """

    def __init__(self, workload: Workload, costs: StepCosts | None = None) -> None:
        self.workload = workload
        self.costs = costs or StepCosts()
        self._lengths = workload.lengths()
        # Response r reads its luck from r * stride on, one draw per token, whoever drafts it and however deep.
        self._stride = int(self._lengths.max()) + 64
        generator = np.random.default_rng(workload.seed + 1)
        self._luck = generator.random(self._stride * workload.num_requests, dtype=np.float32)
        self.progress = 0.0

    def run(self, selector: StrategySelector, drafter_version: int = -1) -> Outcome:
        """Roll out once under `selector`, which learns from it and is told the drafter's version."""
        noise = np.random.default_rng(self.workload.seed + 2)
        outcome = Outcome()
        alive = np.arange(len(self._lengths))
        written = np.zeros_like(self._lengths)
        missed = np.zeros_like(self._lengths)
        while alive.size:
            self.progress = float(written.max() / self._lengths.max())
            context = self.workload.prompt_length + float(written[alive].mean())
            state = SelectorState(alive.size, context, drafter_version)
            strategy = selector.select(state)
            seconds = self.costs.step(alive.size, strategy, context)
            if strategy.is_learned:
                seconds += self.costs.catch_up(int(missed[alive].sum()))
                missed[alive] = 0
            emitted = self._emit(alive, written, strategy)
            if not strategy.is_learned:
                missed[alive] += emitted
            written[alive] += emitted
            num_tokens = int(emitted.sum())
            outcome.tokens += num_tokens
            outcome.makespan += seconds
            outcome.trace.append(Step(alive.size, strategy, num_tokens, seconds))
            seen = seconds * float(np.exp(self.workload.noise * noise.standard_normal()))
            seen += 0.01 * (noise.random() < self.workload.pause_share)
            selector.record(state, strategy, tuple(emitted.tolist()), seen)
            alive = alive[written[alive] < self._lengths[alive]]
        return outcome

    def expected_rate(self, state: SelectorState, strategy: Strategy) -> float:
        """Return the true tokens per second and request of `strategy` now, without catch-up."""
        reach, expected = 1.0, 1.0
        for chance in self._chances(strategy):
            reach *= float(chance)
            expected += reach
        return expected / self.costs.step(state.batch_size, strategy, state.mean_context)

    def _chances(self, strategy: Strategy) -> np.ndarray:
        if strategy.is_off:
            return np.empty(0, np.float32)
        chances = list(self.workload.acceptance[strategy.drafter](self.progress))[: strategy.num_draft_tokens]
        chances += chances[-1:] * (strategy.num_draft_tokens - len(chances))
        return np.array(chances, np.float32)

    def _emit(self, alive: np.ndarray, written: np.ndarray, strategy: Strategy) -> np.ndarray:
        """Return tokens gained by each live response, with the bonus, up to its end: (len(alive),)."""
        position = written[alive]
        left = self._lengths[alive] - position
        if strategy.is_off:
            return np.ones_like(left)
        first = alive * self._stride + position
        accepted = self._luck[first[:, None] + np.arange(strategy.num_draft_tokens)] < self._chances(strategy)
        return np.minimum(np.logical_and.accumulate(accepted, axis=1).sum(1) + 1, left)
