"""Measuring what steps cost on this machine before the first rollout, for selectors that want to know.

The live engine writes a few tokens after random prompts under one fixed strategy after the other, through the same loop
as a rollout: what is timed is what will be chosen among. Looked-up drafts are stood in for by fillers, as random texts
have nothing in common. A rollout afterwards cannot tell that this has been: its random numbers are seeded anew, and
counters, texts, alarm and trace are others.
"""

from __future__ import annotations

import logging
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from typing_extensions import override

from tlt_lightning.engine.base import OnProgress, Request, RolloutProgress
from tlt_lightning.speculation.counters import arm_name
from tlt_lightning.speculation.lookup import Found, RunningTexts
from tlt_lightning.speculation.strategy import OFF, MeasuredStep, SelectorState, Strategy, StrategySelector

log = logging.getLogger(__name__)

Decode = Callable[[Sequence[Request], OnProgress], Iterator[Any]]
"""Writes answers to requests, none of which ends before its limit."""

MAX_SECONDS = 3.0
"""Time for all measurements; a step under way is finished."""

STEPS = 5
"""Steps timed of each strategy and batch size; the first is dropped and the fastest counts, as others may share the
machine."""

MAX_STEPS = 20
"""Steps after which a strategy is given up: it never settled. The first batch takes as many to warm up."""

PROMPT_LENGTH = 8


class Dial(StrategySelector):
    """Chooses what it is set to and keeps the times it is told of.

    Args:
        num_misses: Counts the steps so far that ran without a CUDA graph where others have one; steps of a strategy
            that missed one are not kept.
    """

    def __init__(self, num_misses: Callable[[], int]) -> None:
        self.num_misses = num_misses
        self.strategy = OFF
        self.times: defaultdict[tuple[int, Strategy], list[tuple[float, float]]] = defaultdict(list)

    @override
    def arms(self, batch_size: int) -> tuple[Strategy, ...]:
        return (OFF,) if self.strategy.is_off else (OFF, self.strategy)

    @override
    def select(self, state: SelectorState) -> Strategy:
        return self.strategy

    @override
    def record(self, state: SelectorState, strategy: Strategy, num_emitted: tuple[int, ...], seconds: float) -> None:
        self.times[state.batch_size, strategy].append((seconds, state.mean_context))


class FillerTexts(RunningTexts):
    """Texts in which every look-up finds something, where no head drafts too; nobody will accept it."""

    @override
    def propose(self, request_id: str, tail: Sequence[int], strategy: Strategy, num_tokens: int) -> Found | None:
        found = super().propose(request_id, tail, strategy, num_tokens)
        return found if strategy.drafter == "mixed" else Found([0] * num_tokens, (strategy.drafter, 0))


def batch_sizes(max_num_seqs: int) -> list[int]:
    """Where steps are measured: batches that grow fourfold, and the largest."""
    return sorted({*(4**power for power in range(6) if 4**power < max_num_seqs), max_num_seqs})


def measure_steps(dial: Dial, decode: Decode, selector: StrategySelector, max_num_seqs: int) -> list[MeasuredStep]:
    """Measure each arm of `selector` at several batch sizes, small ones first, until the time is up.

    Args:
        dial: The selector in force in the engine.
        decode: Writes with it.
        selector: Whose arms are measured.
        max_num_seqs: Largest batch.
    """
    started = time.perf_counter()
    deadline, measured = started + MAX_SECONDS, []
    for size in batch_sizes(max_num_seqs):
        if time.perf_counter() > deadline:
            break
        script = _turn(dial, size, selector.arms(size), deadline)
        try:
            for _ in decode(_requests(size), _following(script, size)):
                pass
        except _Enough:
            pass
        for strategy in selector.arms(size):
            if times := dial.times[size, strategy][1:]:
                seconds, context = min(times)
                measured.append(MeasuredStep(size, strategy, context, seconds))
    log.info("Measured steps in %.1f s. %s", time.perf_counter() - started, table(measured))
    return measured


def table(measured: Sequence[MeasuredStep]) -> str:
    """Milliseconds by batch size and strategy, in one line."""
    rows: dict[int, list[str]] = defaultdict(list)
    for step in measured:
        rows[step.batch_size].append(f"{arm_name(step.strategy)} {1e3 * step.seconds:.2f}")
    return "; ".join(f"batch {size}, ms: {', '.join(cells)}" for size, cells in rows.items())


class _Enough(Exception):
    """Ends a rollout from its progress callback."""


def _requests(number: int) -> list[Request]:
    draw = random.Random(0)
    prompts = [[draw.randrange(16) for _ in range(PROMPT_LENGTH)] for _ in range(number)]
    return [Request(id=i, prompt_ids=prompt) for i, prompt in enumerate(prompts)]


def _following(script: Iterator[None], size: int) -> OnProgress:
    def on_progress(progress: RolloutProgress) -> None:
        if progress.running == size and progress.tokens >= size and next(script, _Enough) is _Enough:
            raise _Enough

    return on_progress


def _turn(dial: Dial, size: int, arms: Sequence[Strategy], deadline: float) -> Iterator[None]:
    """Turn the dial to one arm after the other, each for as many steps as are to be measured."""
    if not dial.times:
        dial.strategy = arms[-1]
        for _ in range(MAX_STEPS):
            yield
            if time.perf_counter() > deadline - MAX_SECONDS / 2:
                break
        dial.times.clear()
    for strategy in arms:
        dial.strategy = strategy
        times = dial.times[size, strategy]
        misses = -1
        for _ in range(MAX_STEPS):
            yield
            if misses < 0 and times:
                misses = dial.num_misses()
            if len(times) >= STEPS:
                break
            if time.perf_counter() > deadline:
                return
        if dial.num_misses() > misses >= 0:
            times.clear()
