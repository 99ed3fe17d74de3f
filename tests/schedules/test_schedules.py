"""The schedules alone, over an ideal engine: every running response gets a token a step, and lengths earn rewards."""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from types import SimpleNamespace
from typing import Any

import pytest

from tlt_lightning import PartialRollout, RolloutSchedule, SynchronousSchedule, TailBatching
from tlt_lightning.engine import TransformersEngine
from tlt_lightning.metrics import IterationLog
from tlt_lightning.objectives import GRPO, BehaviourPolicy
from tlt_lightning.rollout import Response, Sampling
from tlt_lightning.schedules.answer_lengths import AnswerLengths
from tlt_lightning.schedules.backlog import Backlog
from tlt_lightning.schedules.base import PendingGroup, RolloutDemand
from tlt_lightning.schedules.under_way import RolloutUnderWay

PLUGINS = Path(__file__).parents[2] / "docs/your_plugins.md"
SIZE = 4  # responses of a group
NUM_PROMPTS = 44


def chance_to_end(prompt: int) -> float:
    """Prompts differ in length, and the longest is twenty times the shortest."""
    return (0.2, 0.1, 0.05, 0.01)[prompt % 4]


class Run:
    """Iterations of one rank, over prompts that are drawn in turn; `has_seeds` gives each response noise of its own."""

    def __init__(self, schedule: RolloutSchedule, seed: int = 0, *, has_seeds: bool = False) -> None:
        self.backlog, self.noise, self.position = Backlog(schedule), random.Random(seed), 0
        self.has_seeds, self.answer_lengths = has_seeds, AnswerLengths()
        self.num_steps = self.written = 0
        self.log = IterationLog()
        self.learned: list[dict[int, list[Response]]] = []  # of each iteration, by draw

    def iterate(self, wanted: int) -> None:
        iteration = len(self.learned)
        demand = RolloutDemand(wanted=wanted, iteration=iteration)
        groups, num_fresh = self.backlog.begin(demand, self.log)
        groups += [self._draw(draw, iteration) for draw in range(self.position, self.position + num_fresh)]
        self.position += num_fresh
        under_way = RolloutUnderWay(self.backlog.schedule, demand, self.backlog.start(demand, groups), SIZE)
        self._write(under_way, iteration)
        self.backlog.end(under_way, self.log)
        self.answer_lengths.learn(under_way.lengths, lambda own: [own])
        taken = [number // SIZE for number in under_way.taken]
        responses = [under_way.responses[number] for number in under_way.taken]
        self.learned.append({d: [r for t, r in zip(taken, responses, strict=True) if t == d] for d in taken})

    def _draw(self, draw: int, iteration: int) -> PendingGroup:
        prompt = draw % NUM_PROMPTS
        expected = self.answer_lengths.means.get(prompt, 0.0)
        return PendingGroup(prompt=prompt, draw=draw, drawn_in=iteration, begun_in=iteration, expected_tokens=expected)

    def _write(self, under_way: RolloutUnderWay, version: int) -> None:
        requests = under_way.requests([[5]] * len(under_way.groups), has_seeds=self.has_seeds)
        noise = {r.id: self.noise if r.seed is None else random.Random(r.seed) for r in requests}
        texts: dict[int, list[int]] = {request.id: [] for request in requests}
        before = {request.id: request.written for request in requests}

        def respond(number: int, reason: str) -> bool:
            text, written = texts[number], before[number]
            segments = [(version, len(text))] if written is None else [*written.segments, (version, len(text))]
            tokens = [*(() if written is None else written.token_ids), *text]
            versions, counts = zip(*segments, strict=True)
            return under_way.add(Response(number, tokens, [0.0] * len(tokens), reason, versions, version_tokens=counts))

        has_enough = False
        while texts and not has_enough:
            self.num_steps += 1
            self.written += len(texts)
            for number in list(texts):
                chance = chance_to_end(number // SIZE % NUM_PROMPTS)
                texts[number].append(noise[number].randrange(10))
                if noise[number].random() < chance:
                    has_enough |= respond(number, "stop")
                    del texts[number]
        for number in list(texts):
            respond(number, "unfinished")


def run(schedule: RolloutSchedule, num_iterations: int, wanted: int = 8, seed: int = 0, **other: Any) -> Run:
    done = Run(schedule, seed, **other)
    for _ in range(num_iterations):
        done.iterate(wanted)
    return done


def gradient(done: Run) -> tuple[float, float]:
    """Return mean and standard error of GRPO's gradient by the logit to end, where longer answers earn more.

    A response is a row of choices to go on, at 1 - p, and one to end, at p: the derivative of its log-prob is
    1 - length * p.
    """
    found = []
    for draw, group in (item for iteration in done.learned for item in iteration.items()):
        lengths, chance = [len(response.token_ids) for response in group], chance_to_end(draw % NUM_PROMPTS)
        mean = fmean(lengths)
        found.append(fmean(chance * (length - mean) * (1 - length * chance) for length in lengths))
    return fmean(found), stdev(found) / len(found) ** 0.5


class ByOutcome(TailBatching):
    """Tail batching as it must not be: what turns out long waits, and is written anew."""

    stops = True

    def start(self, demand: RolloutDemand, groups: Sequence[PendingGroup]) -> Sequence[int]:
        return range(len(groups))

    def choose(
        self, demand: RolloutDemand, groups: Sequence[PendingGroup], complete: Sequence[int]
    ) -> Sequence[int] | None:
        return sorted(complete[: demand.wanted]) if len(complete) >= demand.wanted else None


def texts_of(done: Run) -> Counter[tuple[int, ...]]:
    everything = [r for iteration in done.learned for group in iteration.values() for r in group]
    return Counter(tuple(response.token_ids) for response in everything)


def test_a_cycle_of_tail_batching_learns_from_what_the_synchronous_schedule_would() -> None:
    """Text by text, where the noise of a response hangs on its draw alone."""
    schedules = SynchronousSchedule(), TailBatching(0.25)  # four short iterations, one long
    plain, batched = (run(schedule, 5 * 8, has_seeds=True) for schedule in schedules)
    assert texts_of(batched) == texts_of(plain)
    assert sorted(draw for iteration in batched.learned for draw in iteration) == list(range(40 * 8))
    assert batched.written == plain.written  # nothing is thrown away
    assert batched.num_steps < 0.85 * plain.num_steps
    assert batched.backlog.deferred == []


@pytest.mark.slow
def test_the_expected_gradient_under_tail_batching_is_the_synchronous_one() -> None:
    schedules = SynchronousSchedule(), TailBatching(1.0), PartialRollout(0.5), ByOutcome(1.0)
    (plain, error), *others = [gradient(run(schedule, 600, seed=1)) for schedule in schedules]
    tail, partial, by_outcome = [(mean - plain) / (error**2 + other**2) ** 0.5 for mean, other in others]
    assert abs(tail) < 3 > abs(partial)
    assert by_outcome > 4  # learning would lean to short responses


def test_what_is_deferred_beyond_a_long_iteration_waits_for_the_next() -> None:
    batched = run(TailBatching(0.5), 30, wanted=3)  # two are deferred at a time: of four, one is left
    draws = [draw for iteration in batched.learned for draw in iteration]
    waiting = [group.draw for group in batched.backlog.deferred]
    assert sorted(draws + waiting) == list(range(batched.position))
    assert batched.log.read()["schedule/deferrals"] == ("max", 1)


def test_within_a_cycle_short_ones_come_first_and_none_waits_longer_than_it() -> None:
    batched = run(TailBatching(0.25), 20)  # the first five know nothing of the prompts
    means = [sum(len(r.token_ids) for group in it.values() for r in group) / (8 * SIZE) for it in batched.learned]
    assert all(means[at + 4] > max(means[at : at + 4]) for at in (5, 10, 15))
    numbers = batched.log.read()
    assert numbers["schedule/deferrals"] == ("max", 1)
    assert numbers["schedule/waited"] == ("max", 4)
    assert "schedule/tokens_thrown_away" not in numbers


@pytest.mark.parametrize("lag", [1, 3])
def test_partial_rollouts_lose_no_prompt_and_keep_their_bound(lag: int) -> None:
    partial = run(PartialRollout(0.5, lag), 40)
    plain = run(SynchronousSchedule(), 40)
    draws = [draw for iteration in partial.learned for draw in iteration]
    assert len(draws) == len(set(draws)) == 40 * 8
    waiting = {group.draw for group in partial.backlog.deferred}
    assert {*draws} | waiting == set(range(partial.position))
    assert len(waiting) == 4
    ages = [i - v for i, it in enumerate(partial.learned) for g in it.values() for r in g for v in r.policy_versions]
    assert max(ages) == lag
    assert partial.num_steps < plain.num_steps
    numbers = partial.log.read()
    assert numbers["schedule/tokens_thrown_away"] == ("sum", 0)
    learned = [response for iteration in partial.learned for group in iteration.values() for response in group]
    continued = sum(len(response.segments) > 1 for response in learned) / len(learned)
    assert numbers["schedule/continued"] == ("mean", pytest.approx(continued))
    assert 0 < continued < 0.5
    counts = [r.version_tokens for r in (*learned, *(r for group in partial.backlog.deferred for r in group.responses))]
    read_again = sum(sum(each[:end]) for each in counts for end in range(1, len(each)))
    assert numbers["schedule/tokens_read_again"] == ("sum", read_again)
    for iteration in partial.learned:
        assert all(sum(c for _, c in r.segments) == len(r.token_ids) for group in iteration.values() for r in group)


def test_what_is_older_than_the_bound_is_written_anew() -> None:
    partial = run(PartialRollout(0.5, 3), 3)
    held = {group.draw: group for group in partial.backlog.deferred}
    partial.backlog.schedule = PartialRollout(0.5, 1)
    groups, num_fresh = partial.backlog.begin(RolloutDemand(wanted=8, iteration=4), partial.log)
    assert [group.responses for group in groups] == [()] * 4
    assert {group.begun_in for group in groups} == {4}
    assert num_fresh == 8
    dropped = sum(group.num_tokens for group in held.values())
    assert partial.log.read()["schedule/tokens_thrown_away"][1] == dropped > 0


def test_a_run_that_returns_to_the_synchronous_schedule_answers_what_waits() -> None:
    partial = run(PartialRollout(0.5), 2)
    waiting = {group.draw for group in partial.backlog.deferred}
    partial.backlog.schedule = SynchronousSchedule()
    partial.iterate(3)  # fewer than wait
    partial.iterate(8)
    assert set(partial.learned[-2]) < waiting < {*partial.learned[-2], *partial.learned[-1]}
    assert partial.backlog.deferred == []


def load_backlog(
    backlog: Backlog,
    saved: list[Any],
    rank: int = 0,
    world_size: int = 1,
    group_size: int = SIZE,
    max_tokens: int = 10**6,
) -> None:
    backlog.load(
        [{"deferred": groups, "written_in": {}} for groups in saved],
        rank,
        world_size,
        group_size=group_size,
        max_tokens=max_tokens,
    )


def test_a_saved_backlog_is_the_one_that_was_and_other_ranks_deal_it_out() -> None:
    backlog = run(PartialRollout(0.5), 2).backlog
    saved, held = backlog.state_dict(backlog.deferred)["deferred"], backlog.deferred
    assert any(response.token_ids for group in held for response in group.responses)
    for rank, was in enumerate((held, [])):
        load_backlog(backlog, [saved, []], rank, 2)
        assert backlog.deferred == was
    parts = []
    for rank in range(3):
        load_backlog(backlog, [saved[:1], saved[1:]], rank, 3)
        parts += backlog.deferred
    assert sorted(group.draw for group in parts) == sorted(group.draw for group in held)


def test_a_run_with_smaller_groups_or_shorter_texts_goes_on_with_what_fits() -> None:
    backlog = run(PartialRollout(0.5), 2).backlog
    saved, held = backlog.state_dict(backlog.deferred)["deferred"], backlog.deferred
    lengths = [max(len(response.token_ids) for response in group.responses) for group in held]
    limit = sorted(lengths)[1]
    load_backlog(backlog, [saved], group_size=2, max_tokens=10**6)
    assert backlog.deferred == [replace(group, responses=group.responses[:2]) for group in held]
    course = RolloutUnderWay(backlog.schedule, RolloutDemand(wanted=2, iteration=3), backlog.deferred, 2)
    for group in held:
        for member, response in enumerate(group.responses[:2]):
            assert course.responses[2 * group.draw + member].token_ids == response.token_ids
    load_backlog(backlog, [saved], max_tokens=limit)
    assert [bool(group.responses) for group in backlog.deferred] == [length < limit for length in lengths]
    for state in (ended := saved[lengths.index(limit)])["responses"]:
        state["finish_reason"] = "stop"
    load_backlog(backlog, [[ended]], max_tokens=limit)
    assert backlog.deferred[0].responses  # as long as it may be, and whole
    load_backlog(backlog, [[ended]], max_tokens=limit - 1)
    assert not backlog.deferred[0].responses


def test_a_run_with_larger_groups_writes_what_they_lack() -> None:
    for schedule in (PartialRollout(0.5), TailBatching(0.5)):
        backlog, log = run(schedule, 1).backlog, IterationLog()
        demand = RolloutDemand(wanted=len(backlog.deferred), iteration=1)
        groups, _ = backlog.begin(demand, log)
        course = RolloutUnderWay(schedule, demand, groups, SIZE + 1)
        for number in course.open_ids:
            course.add(Response(number, [5], [0.0], "stop", (1,)))
        assert len(course.taken) == len(groups) * (SIZE + 1)
        backlog.end(course, log)


class Continuing(RolloutSchedule):
    """A user's, which says nothing of older weights."""

    def begin(self, demand: RolloutDemand, deferred: Sequence[PendingGroup]) -> tuple[list[PendingGroup], int]:
        return list(deferred), demand.wanted + 1

    choose = SynchronousSchedule.choose


def test_a_schedule_of_ones_own_is_taken_to_learn_from_older_weights() -> None:
    with pytest.raises(ValueError, match=r"`data.schedule` Continuing learns.*`continues = False`"):
        Backlog(Continuing()).check(TransformersEngine(), Sampling(), GRPO(correction=None))
    Backlog(Continuing()).check(TransformersEngine(), Sampling(), GRPO())


def test_what_a_schedule_cannot_work_with_is_refused_before_it_starts() -> None:
    backlog, engine = Backlog(PartialRollout()), TransformersEngine()
    backlog.check(engine, Sampling(), GRPO())
    with pytest.raises(ValueError, match=r"`objective.correction` is None"):
        backlog.check(engine, Sampling(), GRPO(correction=None))
    backlog.check(engine, Sampling(), GRPO(correction=None, proximal=BehaviourPolicy()))  # whose ratio holds the age
    with pytest.raises(ValueError, match=r"`sampling.stop_strings` is \('x',\)"):
        backlog.check(engine, Sampling(stop_strings=("x",)), GRPO())
    Backlog(TailBatching()).check(engine, Sampling(stop_strings=("x",)), GRPO(correction=None))
    other: Any = SimpleNamespace(can_stop=False)
    with pytest.raises(ValueError, match=r"cannot stop requests.*PartialRollout"):
        Backlog(PartialRollout()).check(other, Sampling(), GRPO())
    for schedule in (None, TailBatching()):
        Backlog(schedule).check(other, Sampling(), GRPO())


def test_dynamic_sampling_goes_on_with_what_the_first_rollout_left() -> None:
    partial = run(PartialRollout(0.5), 1)
    waiting = {group.draw for group in partial.backlog.deferred}
    groups, num_fresh = partial.backlog.begin(RolloutDemand(wanted=2, iteration=0, is_first=False), partial.log)
    assert {group.draw for group in groups} == waiting
    assert num_fresh == 0
    batched = run(TailBatching(0.25), 1)
    assert batched.backlog.begin(RolloutDemand(wanted=2, iteration=0, is_first=False), batched.log) == ([], 2)
    assert len(batched.backlog.deferred) == 2


def test_what_was_put_aside_may_be_enough_without_a_rollout() -> None:
    response = Response(0, [7], [0.0], "stop", (0,))
    groups = [
        PendingGroup(prompt=draw, draw=draw, drawn_in=0, begun_in=0, responses=(response,) * SIZE if draw < 2 else ())
        for draw in range(3)
    ]
    course = RolloutUnderWay(PartialRollout(0.5), RolloutDemand(wanted=2, iteration=1), groups, SIZE)
    assert course.requests([[5]] * 3) == []
    assert course.taken == list(range(2 * SIZE))
    assert [group.draw for group in course.deferred()] == [2]


def test_a_group_that_got_no_seat_is_waited_for_like_one_that_was_begun() -> None:
    schedule = PartialRollout(0.5, 1)
    groups = [PendingGroup(prompt=draw, draw=draw, drawn_in=0, begun_in=0) for draw in range(2)]
    course = RolloutUnderWay(schedule, RolloutDemand(wanted=1, iteration=0), groups, 2)
    for number in range(4):
        tokens = [5] * (number < 2)
        course.add(Response(number, tokens, [0.0] * len(tokens), "stop" if tokens else "unfinished", (0,)))
    demand = RolloutDemand(wanted=1, iteration=1)
    taken_up, num_fresh = schedule.begin(demand, course.deferred())
    assert [group.begun_in for group in taken_up] == [0]
    fresh = [PendingGroup(prompt=2, draw=2, drawn_in=1, begun_in=1)] * num_fresh
    assert schedule.choose(demand, [*taken_up, *fresh], [1]) is None
    assert schedule.choose(demand, [*taken_up, *fresh], [1, 0]) == [0]


def test_what_was_drawn_and_not_begun_ages_from_its_beginning_and_is_not_dropped() -> None:
    partial = run(PartialRollout(1.0, 5), 1)
    ended = [Response(i, [5, 1], [0.0, 0.0], "stop", (0,)) for i in range(SIZE)]
    partial.backlog.deferred = [replace(group, responses=tuple(ended)) for group in partial.backlog.deferred]
    partial.iterate(2)  # of eight that are put aside and whole
    assert len(partial.learned[-1]) == 2
    partial.backlog.deferred = partial.backlog.deferred[:1]
    partial.iterate(1)
    drawn = [group for group in partial.backlog.deferred if not group.responses]
    assert [group.deferrals for group in drawn] == [1]
    taken_up, _ = partial.backlog.schedule.begin(RolloutDemand(wanted=1, iteration=3), drawn)
    assert [group.begun_in for group in taken_up] == [3]  # none of it is older
    num_steps = partial.num_steps
    partial.iterate(1)
    assert {group.draw for group in drawn} <= set(partial.learned[-1])
    assert partial.num_steps > num_steps
    assert {age for r in partial.learned[-1][drawn[0].draw] for age in r.policy_versions} == {3}


def test_the_example_of_a_custom_schedule_works() -> None:
    names: dict[str, Any] = {}
    exec(PLUGINS.read_text().split('title="my_schedule.py"\n')[1].split("```")[0], names)
    done = run(names["OneWaits"](), 6)
    assert [len(iteration) for iteration in done.learned] == [8] * 6
    draws = [draw for iteration in done.learned for draw in iteration]
    left = [group.draw for group in done.backlog.deferred]
    assert sorted(draws + left) == list(range(6 * 8 + 1))
