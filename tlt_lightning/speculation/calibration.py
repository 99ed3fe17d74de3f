"""Measure seconds of engine steps before the first rollout, for selectors that want them.

The live engine writes a few tokens after random prompts under one fixed strategy after the other, through the loop of a
rollout, so that the steps timed are those that a rollout has. Fillers stand in for look-ups, as random texts have
nothing in common. Rollouts stay as they would be: random numbers, counters, texts, alarm and trace are kept apart.

A shared machine may be twice as slow in one second as in the next, so every arm is measured between two turns of off,
and its ratio to them counts: ``seconds(arm) = min(arm) / mean(min(off before), min(off after)) * median(min(off))``,
minima because others only ever add time. The scatter of the steps is the measurement's error.
"""

import logging
import random
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from statistics import median

from typing_extensions import override

from tlt_lightning.ranks.engine_ranks import EngineRanks
from tlt_lightning.speculation.lookup import LookupDraft, LookupDrafter
from tlt_lightning.speculation.selectors.rules import FixedSelector
from tlt_lightning.speculation.strategy import OFF, MeasuredStep, SelectorState, Strategy

log = logging.getLogger(__name__)

Decode = Callable[[int], Generator[object, None, None]]
"""Starts so many responses, none of which ends early; `next` takes one engine step."""

MAX_SECONDS = 3.0
"""Time for all measurements, after half as much to warm up; a step under way is finished."""

STEPS = 3
"""Steps timed in each turn of a strategy, after one that is dropped."""

MAX_STEPS = 20
"""Steps after which a turn is given up: it never settled. The first batch takes as many to warm up."""

PROMPT_LENGTH = 8

LEAST_ERROR = 0.1
"""Relative error below which no measurement is trusted: what was the same in all its turns does not scatter."""


class CalibrationSelector(FixedSelector):
    """Chooses the strategy that `time_steps` sets and keeps the seconds of the steps under it.

    `num_misses` counts the steps so far that ran without a CUDA graph where others have one.
    """

    def __init__(self, num_misses: Callable[[], int]) -> None:
        super().__init__(0)
        self.num_misses = num_misses
        self.batch_size = 0
        self.seconds: list[float] = []
        self.context = 0.0

    @override
    def record(self, state: SelectorState, strategy: Strategy, num_emitted: tuple[int, ...], seconds: float) -> None:
        if (state.batch_size, strategy) == (self.batch_size, self.strategy):
            self.seconds.append(seconds)
            self.context = state.mean_context

    def time_steps(self, strategy: Strategy, steps: Iterator[object], deadline: float) -> list[float]:
        """Time steps of `strategy`; [] if it never settles, misses a CUDA graph or time is up."""
        self.strategy, self.seconds = strategy, []
        misses = None
        for _ in range(MAX_STEPS):
            next(steps, None)
            if misses is None and self.seconds:
                misses = self.num_misses()
            if len(self.seconds) > STEPS:
                break
            if time.perf_counter() > deadline:
                return []
        return self.seconds[1:] if misses == self.num_misses() else []


class FillerDrafter(LookupDrafter):
    """Drafts fillers, never accepted, in every look-up where no head drafts too."""

    @override
    def propose(self, request_id: str, strategy: Strategy, num_tokens: int) -> LookupDraft | None:
        draft = super().propose(request_id, strategy, num_tokens)
        if strategy.drafter == "mixed" or request_id not in self._texts:
            return draft
        return LookupDraft([0] * num_tokens, strategy.drafter, 0, len(self._texts[request_id].tokens))


def random_prompts(number: int) -> list[list[int]]:
    """Return prompts of tokens that every vocabulary has."""
    draw = random.Random(0)
    return [[draw.randrange(16) for _ in range(PROMPT_LENGTH)] for _ in range(number)]


def batch_sizes(num_requests: int, max_num_seqs: int) -> list[int]:
    """Return the batch sizes to measure: that of a rollout's begin, others each four times the last, the largest."""
    first = max(1, min(num_requests, max_num_seqs))
    return [first, *sorted({*(4**power for power in range(6) if 4**power < max_num_seqs), max_num_seqs} - {first})]


def lead_measuring(decode: Decode, engine_ranks: EngineRanks) -> Decode:
    """Return `decode` for the rank that measures: it tells the others of every batch and step (`follow_measuring`)."""

    def led(number: int) -> Generator[object, None, None]:
        engine_ranks.decide(lambda: number)
        with closing(decode(number)) as steps:
            try:
                while True:
                    engine_ranks.decide(lambda: True)
                    yield next(steps, None)
            finally:
                engine_ranks.decide(lambda: False)  # in the rollout, as for those that follow: meetings are counted

    return led


def follow_measuring(decode: Decode, engine_ranks: EngineRanks) -> None:
    """Decode the batches of the rank that measures, step by step, until it tells of a batch of none."""
    while number := engine_ranks.decide(lambda: 0):
        with closing(decode(number)) as steps:
            while engine_ranks.decide(lambda: False):
                next(steps, None)


def measure_steps(
    selector: CalibrationSelector, decode: Decode, arms: Callable[[int], Sequence[Strategy]], sizes: Sequence[int]
) -> list[MeasuredStep]:
    """Measure strategies at several batch sizes, until time is up.

    Args:
        selector: The selector that is in force in the engine.
        decode: Writes under it.
        arms: The strategies to measure at a batch size, off among them.
        sizes: The batch sizes, in their order.
    """
    deadline = (started := time.perf_counter()) + MAX_SECONDS
    measured: list[MeasuredStep] = []
    for size in sizes:
        selector.batch_size = size
        with closing(decode(size)) as steps:
            if not measured:  # the machine's first steps are slow
                selector.time_steps(OFF, steps, deadline - MAX_SECONDS / 2)
                selector.time_steps(arms(size)[-1], steps, deadline - MAX_SECONDS / 2)
            if size == sizes[0]:
                deadline = time.perf_counter() + MAX_SECONDS  # all of it for what is measured
            found = _measure_batch(selector, steps, size, arms(size), deadline)
        measured += found
        is_too_large = not found and size > sizes[0]
        if is_too_large or time.perf_counter() > deadline:
            break  # larger batches do not fit into the cache either; or there is no time left
    seconds = time.perf_counter() - started
    if measured:
        log.info("%s (measured in %.1f s)", described(measured), seconds)
    else:
        log.warning(
            "The engine was too slow to be timed in %.1f s (is the machine busy, or `kv_cache_gib` too small?). The "
            "selector begins with another machine's times and corrects them; the next weight sync tries again.",
            seconds,
        )
    return measured


def _measure_batch(
    selector: CalibrationSelector, steps: Iterator[object], size: int, arms: Sequence[Strategy], deadline: float
) -> list[MeasuredStep]:
    """Measure off, an arm, off, the next arm, ..., off."""
    before = selector.time_steps(OFF, steps, deadline)
    plain, ratios, errors = [before], {}, {}
    for arm in arms:
        if arm.is_off or not plain[-1]:
            continue
        during, after = selector.time_steps(arm, steps, deadline), selector.time_steps(OFF, steps, deadline)
        if during and after:
            ratios[arm] = 2 * min(during) / (min(before) + min(after))
            errors[arm] = max(median(times) / min(times) - 1 for times in (before, during, after))
        plain.append(after)
        before = after
    fastest = [min(times) for times in plain if times]
    if not fastest:
        return []
    off = median(fastest)
    ratios[OFF], errors[OFF] = 1.0, (max(fastest) - min(fastest)) / 2 / off
    return [
        MeasuredStep(size, arm, selector.context, ratios[arm] * off, max(LEAST_ERROR, errors[arm]))
        for arm in arms
        if arm in ratios
    ]


def described(measured: Sequence[MeasuredStep]) -> str:
    """Say how long an engine step takes at the smallest and the largest batch, with the longest draft of each kind."""
    cells: dict[int, list[str]] = defaultdict(list)
    longest = {(step.batch_size, step.strategy.is_off, step.strategy.drafter): step for step in measured}
    for step in longest.values():
        drafts = f"with {step.strategy.num_draft_tokens} drafted ({step.strategy.drafter})"
        cells[step.batch_size].append(f"{1e3 * step.seconds:.1f} ms {'plain' if step.strategy.is_off else drafts}")
    rows = (f"of {n} request{'s' * (n > 1)} {', '.join(cells[n])}" for n in sorted({min(cells), max(cells)}))
    return f"An engine step takes: {'; '.join(rows)}"
