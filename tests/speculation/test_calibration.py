"""Measuring steps: interleaved, with an error, within the time, and loud where nothing comes of it."""

import logging
from collections.abc import Callable, Generator
from contextlib import closing
from functools import partial
from itertools import groupby, takewhile
from queue import Queue
from types import SimpleNamespace

import pytest

from tlt_lightning.ranks.engine_ranks import EngineRanks
from tlt_lightning.speculation import CostModelSelector, FixedSelector, calibration
from tlt_lightning.speculation.calibration import (
    LEAST_ERROR,
    CalibrationSelector,
    FillerDrafter,
    batch_sizes,
    follow_measuring,
    lead_measuring,
    measure_steps,
)
from tlt_lightning.speculation.strategy import OFF, MeasuredStep, SelectorState, Strategy


class Machine:
    """An engine of which only the times are there.

    Args:
        seconds: What a step takes, by batch size and strategy.
        settle: Steps of a strategy, after the first, that teach nothing.
        fits: Requests that run at once.
        sleeps: Seconds that pass in a step.
    """

    def __init__(
        self, seconds: Callable[[int, Strategy], float], settle: int = 0, fits: int = 10**9, sleeps: float = 0.0
    ) -> None:
        self.seconds, self.settle, self.fits, self.sleeps = seconds, settle, fits, sleeps
        self.misses = self.num_steps = self.num_open = 0
        self.now = 0.0
        self.selector = CalibrationSelector(lambda: self.misses)
        self.drafted: list[Strategy] = []
        self.begun: dict[int, Generator[object, None, None]] = {}

    def decode(self, size: int) -> Generator[object, None, None]:
        last, steps = None, 0
        self.num_open += 1
        try:
            for _ in range(1000):
                self.now += self.sleeps
                self.num_steps += 1
                state = SelectorState(min(size, self.fits), 20.0)
                strategy = self.selector.select(state)
                steps, last = steps + 1 if strategy == last else 0, strategy
                self.drafted.append(strategy)
                if steps > self.settle:
                    self.selector.record(state, strategy, (1,) * size, self.seconds(size, strategy))
                yield
        finally:
            self.num_open -= 1

    def begin(self, size: int) -> Generator[object, None, None]:
        self.begun[size] = self.decode(size)
        return self.begun[size]

    def measure(self, selector: CostModelSelector | FixedSelector, size: int) -> dict[tuple[int, Strategy], float]:
        self.steps = measure_steps(self.selector, self.begin, selector.arms, batch_sizes(1, size))
        assert self.num_open == 0
        return {(step.batch_size, step.strategy): step.seconds for step in self.steps}


def test_every_arm_is_measured_between_two_turns_of_off() -> None:
    machine = Machine(lambda size, strategy: 2.0 * (1 + strategy.num_draft_tokens))
    measured = machine.measure(CostModelSelector((1, 3)), 1)
    assert measured == {(1, OFF): 2.0, (1, Strategy(1)): 4.0, (1, Strategy(3)): 8.0}
    turns = [a for a, b in zip(machine.drafted, [*machine.drafted[1:], None], strict=True) if a != b]
    assert turns[-5:] == [OFF, Strategy(1), OFF, Strategy(3), OFF]
    assert {step.error for step in machine.steps} == {LEAST_ERROR}
    assert {step.mean_context for step in machine.steps} == {20.0}


def test_a_machine_that_slows_down_meanwhile_does_not_make_later_arms_look_slower() -> None:
    machine = Machine(lambda size, arm: (1.0 + (machine.num_steps > 30)) * (1.5 if arm.num_draft_tokens else 1))
    measured = machine.measure(CostModelSelector((1, 2, 3, 5, 7)), 1)
    plain = measured[1, OFF]
    factors = sorted(measured[1, Strategy(k)] / plain for k in (1, 2, 3, 5, 7))
    assert factors[2:] == pytest.approx([1.5] * 3)  # one turn at most has a slow half
    assert factors[0] > 0.9


def test_an_arm_is_compared_with_the_plain_turns_beside_it_each_by_its_fastest_step() -> None:
    def seconds(size: int, strategy: Strategy) -> float:
        num_plain = [arm for arm, _ in groupby(machine.drafted)].count(OFF)  # the first of them warms up
        num_steps = len(list(takewhile(strategy.__eq__, reversed(machine.drafted))))
        return (2.0 ** (num_plain - 2) if strategy.is_off else 3.0) + 10.0 * (num_steps == 3)

    machine = Machine(seconds)
    measured = machine.measure(CostModelSelector((1, 3)), 1)  # off takes 1.0, 2.0 and 4.0
    assert measured == {(1, OFF): 2.0, (1, Strategy(1)): 4.0, (1, Strategy(3)): 2.0}
    assert [step.error for step in machine.steps] == [(4.0 - 1.0) / 2 / 2.0, LEAST_ERROR, LEAST_ERROR]


def test_what_scatters_is_trusted_less() -> None:
    times = iter(range(10**6))
    machine = Machine(lambda size, strategy: 1.0 + (0.5 * (next(times) % 3) if strategy.num_draft_tokens else 0.0))
    machine.measure(FixedSelector(3), 1)
    errors = {step.strategy: step.error for step in machine.steps}
    assert errors[OFF] == LEAST_ERROR
    assert errors[Strategy(3)] == pytest.approx(0.5)


def test_strategies_that_miss_a_graph_are_left_out() -> None:
    def seconds(size: int, strategy: Strategy) -> float:
        machine.misses += not strategy.is_off and size > 4
        return 0.001

    machine = Machine(seconds)
    assert {(size, arm.num_draft_tokens) for size, arm in machine.measure(FixedSelector(3), 16)} == {
        (1, 0), (1, 3), (4, 0), (4, 3), (16, 0)
    }  # fmt: skip


def test_batches_that_do_not_fit_into_the_cache_are_skipped() -> None:
    machine = Machine(lambda size, strategy: 1.0, fits=9)
    assert {size for size, _ in machine.measure(FixedSelector(3), 256)} == {1, 4}
    assert list(machine.begun) == [1, 4, 16]
    assert machine.num_steps < 70


def test_what_never_settles_is_given_up_and_said(caplog: pytest.LogCaptureFixture) -> None:
    machine = Machine(lambda size, strategy: 1.0, settle=50)
    with caplog.at_level(logging.WARNING):
        assert machine.measure(FixedSelector(3), 4) == {}
    assert "too slow to be timed" in caplog.text


def test_the_time_is_looked_at_in_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "MAX_SECONDS", 0.1)
    for fits in (1, 10**9):
        machine = Machine(lambda size, strategy: 1.0, fits=fits, sleeps=0.005)
        monkeypatch.setattr(calibration, "time", SimpleNamespace(perf_counter=lambda machine=machine: machine.now))
        machine.measure(CostModelSelector(), 256)
        assert machine.now < 0.2  # half of it at most to warm up, then all of it
        assert list(machine.begun) == [1]
        assert machine.num_steps < 40


def test_warming_up_ends_at_half_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(lambda size, strategy: 1.0, settle=50, sleeps=0.25)
    monkeypatch.setattr(calibration, "time", SimpleNamespace(perf_counter=lambda: machine.now))
    assert machine.measure(FixedSelector(3), 1) == {}
    half = int(calibration.MAX_SECONDS / 2 / 0.25)  # steps
    assert machine.drafted[: half + 3] == [OFF] * (half + 1) + [Strategy(3), OFF]


@pytest.mark.parametrize("num_steps", [[3], [2, 0, 4]])
def test_ranks_that_follow_take_the_steps_of_the_one_that_measures(num_steps: list[int]) -> None:
    class Shared(EngineRanks):
        """Hands what the first rank decides to the second."""

        def __init__(self, index: int) -> None:
            self.index, self.num_decided = index, 0

        def decide(self, choose: Callable[[], object]) -> object:
            self.num_decided += 1
            if self.is_first:
                decided.put(choose())
                return None
            return decided.get(timeout=30)

    decided: Queue[object] = Queue()
    taken: list[list[tuple[int, int]]] = [[], []]
    ranks = Shared(0), Shared(1)

    def decode(rank: int, size: int) -> Generator[object, None, None]:
        for step in range(100):
            taken[rank].append((size, step))
            yield
            assert step < 50

    led = lead_measuring(partial(decode, 0), ranks[0])
    for size, number in enumerate(num_steps, start=3):
        with closing(led(size)) as steps:
            for _ in range(number):
                next(steps)
    ranks[0].decide(lambda: 0)
    follow_measuring(partial(decode, 1), ranks[1])
    assert taken[1] == taken[0] == [(size, step) for size, n in enumerate(num_steps, start=3) for step in range(n)]
    assert decided.empty()
    assert ranks[0].num_decided == ranks[1].num_decided


def test_prompts_are_the_same_in_every_run_and_of_tokens_that_every_vocabulary_has() -> None:
    prompts = calibration.random_prompts(9)
    assert prompts == calibration.random_prompts(9)
    assert [len(prompt) for prompt in prompts] == [calibration.PROMPT_LENGTH] * 9
    assert {token for prompt in prompts for token in prompt} == set(range(16))


@pytest.mark.parametrize(
    ("num_requests", "most", "sizes"),
    [
        (0, 1, [1]),
        (1, 4, [1, 4]),
        (48, 6, [6, 1, 4]),
        (48, 256, [48, 1, 4, 16, 64, 256]),
        (256, 256, [256, 1, 4, 16, 64]),
    ],
)
def test_batches_are_that_of_the_rollouts_begin_then_grow_up_to_the_largest(
    num_requests: int, most: int, sizes: list[int]
) -> None:
    assert batch_sizes(num_requests, most) == sizes


def test_where_the_rollouts_batch_does_not_fit_smaller_ones_are_measured() -> None:
    machine = Machine(lambda size, strategy: 1.0, fits=9)
    measure_steps(machine.selector, machine.begin, FixedSelector(3).arms, batch_sizes(64, 64))
    assert list(machine.begun) == [64, 1, 4, 16]


def test_a_filler_is_found_for_every_look_up_and_replaces_no_head() -> None:
    drafter = FillerDrafter(siblings=True, ngram=True)
    drafter.add("a", [1, 2, 3])
    found = drafter.propose("a", Strategy(3, "sibling"), 3)
    assert found is not None
    assert (len(found.tokens), found.num_known, found.source) == (3, 3, ("sibling", 0))
    assert drafter.propose("a", Strategy(3, "mixed"), 3) is None


def test_what_was_measured_is_said_in_words() -> None:
    measured = [
        MeasuredStep(size, Strategy(drafts, "sibling"), mean_context=64.0, seconds=size * seconds)
        for size in (4, 1, 16)
        for drafts, seconds in ((0, 0.05), (1, 0.06), (3, 0.07))
    ]
    assert calibration.described(measured) == (
        "An engine step takes: of 1 request 50.0 ms plain, 70.0 ms with 3 drafted (sibling); "
        "of 16 requests 800.0 ms plain, 1120.0 ms with 3 drafted (sibling)"
    )
