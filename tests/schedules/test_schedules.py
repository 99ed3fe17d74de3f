"""The schedules alone, over an ideal engine: every running response gets a token a step, and lengths earn rewards."""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tlt_lightning import PartialRollout, RolloutSchedule, SynchronousSchedule, TailBatching
from tlt_lightning.engine import TransformersEngine
from tlt_lightning.metrics import IterationLog
from tlt_lightning.objectives import GRPO
from tlt_lightning.rollout import Response, Sampling
from tlt_lightning.schedules.base import Demand, OpenGroup
from tlt_lightning.schedules.course import Backlog, RolloutCourse

PLUGINS = Path(__file__).parents[2] / "docs/your_plugins.md"
SIZE = 4  # responses of a group


def chance_to_end(draw: int) -> float:
    """Prompts differ in length, and the longest is twenty times the shortest."""
    return (0.2, 0.1, 0.05, 0.01)[draw % 4]


class Run:
    """Iterations of one rank."""

    def __init__(self, schedule: RolloutSchedule, seed: int = 0) -> None:
        self.backlog, self.noise, self.position = Backlog(schedule), random.Random(seed), 0
        self.num_steps = self.written = 0
        self.log = IterationLog()
        self.learned: list[dict[int, list[Response]]] = []  # of each iteration, by draw

    def iterate(self, wanted: int) -> None:
        iteration = len(self.learned)
        demand = Demand(wanted=wanted, iteration=iteration)
        groups, num_fresh = self.backlog.begin(demand, self.log)
        draws = range(self.position, self.position + num_fresh)
        self.position += num_fresh
        groups += [OpenGroup(prompt=draw, draw=draw, drawn=iteration, begun=iteration) for draw in draws]
        course = RolloutCourse(self.backlog.schedule, demand, groups, SIZE)
        self._write(course, iteration)
        self.backlog.end(course, self.log)
        taken = [course.groups[number // SIZE].draw for number in course.taken]
        responses = [course.responses[number] for number in course.taken]
        self.learned.append({d: [r for t, r in zip(taken, responses, strict=True) if t == d] for d in taken})

    def _write(self, course: RolloutCourse, version: int) -> None:
        requests = course.requests([[5]] * len(course.groups), 0)
        noise = {r.id: self.noise if r.seed is None else random.Random(r.seed) for r in requests}
        texts: dict[int, list[int]] = {request.id: [] for request in requests}

        def respond(number: int, reason: str) -> bool:
            text, before = texts[number], next(r for r in requests if r.id == number).written
            segments = [(version, len(text))] if before is None else [*before.segments, (version, len(text))]
            tokens = [*(() if before is None else before.token_ids), *text]
            versions, counts = zip(*segments, strict=True)
            return course.add(Response(number, tokens, [0.0] * len(tokens), reason, versions, version_tokens=counts))

        has_enough = False
        while texts and not has_enough:
            self.num_steps += 1
            self.written += len(texts)
            for number in list(texts):
                chance = chance_to_end(course.groups[number // SIZE].draw)
                texts[number].append(noise[number].randrange(10))
                if noise[number].random() < chance:
                    has_enough |= respond(number, "stop")
                    del texts[number]
        for number in list(texts):
            respond(number, "unfinished")


def run(schedule: RolloutSchedule, num_iterations: int, wanted: int = 8, seed: int = 0) -> Run:
    done = Run(schedule, seed)
    for _ in range(num_iterations):
        done.iterate(wanted)
    return done


def reward(response: Response) -> float:
    return -float(len(response.token_ids))


def mean_reward(done: Run) -> float:
    rewards = [reward(r) for iteration in done.learned for group in iteration.values() for r in group]
    return sum(rewards) / len(rewards)


class Seeded(SynchronousSchedule):
    """Synchronous, each group with noise of its own."""

    has_own_noise = True


class Fresh(TailBatching):
    """Tail batching as it would be if deferred prompts were answered with new noise."""

    has_own_noise = False


def texts_of(done: Run) -> Counter[tuple[int, ...]]:
    everything = [r for iteration in done.learned for group in iteration.values() for r in group]
    return Counter(tuple(response.token_ids) for response in everything)


def test_a_cycle_of_tail_batching_learns_from_what_the_synchronous_schedule_would() -> None:
    plain, batched = (run(schedule, 5 * 4) for schedule in (Seeded(), TailBatching(0.25)))  # four short, one long
    assert texts_of(batched) == texts_of(plain)
    assert mean_reward(batched) == mean_reward(plain)
    assert sorted(draw for iteration in batched.learned for draw in iteration) == list(range(20 * 8))
    assert batched.num_steps < 0.8 * plain.num_steps
    assert batched.backlog.aside == []


def test_what_is_deferred_beyond_a_long_iteration_waits_for_the_next() -> None:
    batched = run(TailBatching(0.5), 30, wanted=3)  # two are deferred at a time: of four, one is left
    draws = [draw for iteration in batched.learned for draw in iteration]
    waiting = [group.draw for group in batched.backlog.aside]
    assert sorted(draws + waiting) == list(range(batched.position))
    assert batched.log.read()["schedule/deferrals"] == ("max", 1)


def test_deferred_prompts_with_new_noise_would_lean_to_short_responses() -> None:
    plain, fresh = (run(schedule, 200) for schedule in (SynchronousSchedule(), Fresh(0.25)))
    assert mean_reward(fresh) > mean_reward(plain) * 0.95  # rewards are negative lengths


def test_within_a_cycle_short_ones_come_first_and_none_waits_longer_than_it() -> None:
    batched = run(TailBatching(0.25), 10)
    means = [sum(len(r.token_ids) for group in it.values() for r in group) / (8 * SIZE) for it in batched.learned]
    assert min(means[4], means[9]) > max(means[:4] + means[5:9])
    numbers = batched.log.read()
    assert numbers["schedule/deferrals"] == ("max", 1)
    assert numbers["schedule/waited"] == ("max", 4)
    assert numbers["schedule/repeated"] == ("mean", 1.0)
    thrown = batched.written - sum(len(text) * count for text, count in texts_of(batched).items())
    assert numbers["schedule/tokens_thrown_away"] == ("sum", thrown)


@pytest.mark.parametrize("lag", [1, 3])
def test_partial_rollouts_lose_no_prompt_and_keep_their_bound(lag: int) -> None:
    partial = run(PartialRollout(0.5, lag), 40)
    plain = run(SynchronousSchedule(), 40)
    draws = [draw for iteration in partial.learned for draw in iteration]
    assert len(draws) == len(set(draws)) == 40 * 8
    waiting = {group.draw for group in partial.backlog.aside}
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
    assert numbers["schedule/dropped"] == ("mean", 0.0)
    counts = [r.version_tokens for r in (*learned, *(r for group in partial.backlog.aside for r in group.responses))]
    read_again = sum(sum(each[:end]) for each in counts for end in range(1, len(each)))
    assert numbers["schedule/tokens_read_again"] == ("sum", read_again)
    for iteration in partial.learned:
        assert all(sum(c for _, c in r.segments) == len(r.token_ids) for group in iteration.values() for r in group)


def test_what_is_older_than_the_bound_is_written_anew() -> None:
    partial = run(PartialRollout(0.5, 3), 3)
    held = {group.draw: group for group in partial.backlog.aside}
    partial.backlog.schedule = PartialRollout(0.5, 1)
    groups, num_fresh = partial.backlog.begin(Demand(wanted=8, iteration=4), partial.log)
    assert [group.responses for group in groups] == [()] * 4
    assert {group.begun for group in groups} == {4}
    assert num_fresh == 8
    dropped = sum(group.num_tokens for group in held.values())
    assert partial.log.read()["schedule/tokens_thrown_away"][1] == dropped > 0


def test_a_run_that_returns_to_the_synchronous_schedule_answers_what_waits() -> None:
    partial = run(PartialRollout(0.5), 2)
    waiting = {group.draw for group in partial.backlog.aside}
    partial.backlog.schedule = SynchronousSchedule()
    partial.iterate(3)  # fewer than wait
    partial.iterate(8)
    assert set(partial.learned[-2]) < waiting < {*partial.learned[-2], *partial.learned[-1]}
    assert partial.backlog.aside == []


def load_backlog(
    backlog: Backlog,
    saved: list[Any],
    rank: int = 0,
    world_size: int = 1,
    group_size: int = SIZE,
    max_tokens: int = 10**6,
) -> None:
    backlog.load(
        [{"aside": aside, "written_in": {}} for aside in saved],
        rank,
        world_size,
        group_size=group_size,
        max_tokens=max_tokens,
    )


def test_a_saved_backlog_is_the_one_that_was_and_other_ranks_deal_it_out() -> None:
    backlog = run(PartialRollout(0.5), 2).backlog
    saved, held = backlog.state_dict()["aside"], backlog.aside
    assert any(response.token_ids for group in held for response in group.responses)
    for rank, was in enumerate((held, [])):
        load_backlog(backlog, [saved, []], rank, 2)
        assert backlog.aside == was
    parts = []
    for rank in range(3):
        load_backlog(backlog, [saved[:1], saved[1:]], rank, 3)
        parts += backlog.aside
    assert sorted(group.draw for group in parts) == sorted(group.draw for group in held)


def test_a_run_with_smaller_groups_or_shorter_texts_goes_on_with_what_fits(caplog: pytest.LogCaptureFixture) -> None:
    backlog = run(PartialRollout(0.5), 2).backlog
    saved, held = backlog.state_dict()["aside"], backlog.aside
    lengths = [max(len(response.token_ids) for response in group.responses) for group in held]
    limit = sorted(lengths)[1]
    load_backlog(backlog, [saved], group_size=2, max_tokens=10**6)
    assert backlog.aside == [replace(group, responses=group.responses[:2]) for group in held]
    course = RolloutCourse(backlog.schedule, Demand(wanted=2, iteration=3), backlog.aside, 2)
    assert [course.responses[number].token_ids for number in range(2 * len(held))] == [
        response.token_ids for group in held for response in group.responses[:2]
    ]
    assert not caplog.text
    load_backlog(backlog, [saved], max_tokens=limit)
    assert [bool(group.responses) for group in backlog.aside] == [length < limit for length in lengths]
    caplog.clear()
    for state in (ended := saved[lengths.index(limit)])["responses"]:
        state["finish_reason"] = "stop"
    load_backlog(backlog, [[ended]], max_tokens=limit)
    assert backlog.aside[0].responses  # as long as it may be, and whole
    assert not caplog.text
    load_backlog(backlog, [[ended]], max_tokens=limit - 1)
    assert "responses beyond `sampling.max_tokens`" in caplog.text


def test_a_run_with_larger_groups_writes_what_they_lack() -> None:
    for schedule in (PartialRollout(0.5), TailBatching(0.5)):
        backlog, log = run(schedule, 1).backlog, IterationLog()
        demand = Demand(wanted=len(backlog.aside), iteration=1)
        groups, _ = backlog.begin(demand, log)
        course = RolloutCourse(schedule, demand, groups, SIZE + 1)
        for number in course.open_ids:
            course.add(Response(number, [5], [0.0], "stop", (1,)))
        assert len(course.taken) == len(groups) * (SIZE + 1)
        backlog.end(course, log)


class Continuing(RolloutSchedule):
    """A user's, which says nothing of older weights; or says wrongly that it begins all groups anew."""

    def begin(self, demand: Demand, aside: Sequence[OpenGroup]) -> tuple[list[OpenGroup], int]:
        return list(aside), demand.wanted + 1

    choose = PartialRollout.choose
    max_policy_lag = 2


class Denying(Continuing):
    continues = False


def test_a_schedule_of_ones_own_is_taken_to_learn_from_older_weights_unless_it_begins_groups_anew() -> None:
    with pytest.raises(ValueError, match=r"`data.schedule` Continuing learns.*`continues = False`"):
        Backlog(Continuing()).check(TransformersEngine(), Sampling(), GRPO(correction=None))
    for schedule in (Continuing(), Denying()):
        Backlog(schedule).check(TransformersEngine(), Sampling(), GRPO())
    backlog = run(Continuing(), 1).backlog
    assert any(group.responses for group in backlog.aside)
    backlog.schedule = Denying()
    with pytest.raises(ValueError, match=r"`Denying.begin` goes on with what older weights wrote"):
        backlog.begin(Demand(wanted=1, iteration=1), IterationLog())


def test_what_a_schedule_cannot_work_with_is_refused_before_it_starts() -> None:
    backlog, engine = Backlog(PartialRollout()), TransformersEngine()
    backlog.check(engine, Sampling(), GRPO())
    with pytest.raises(ValueError, match=r"`objective.correction` is None"):
        backlog.check(engine, Sampling(), GRPO(correction=None))
    with pytest.raises(ValueError, match=r"`sampling.stop_strings` is \('x',\)"):
        backlog.check(engine, Sampling(stop_strings=("x",)), GRPO())
    Backlog(TailBatching()).check(engine, Sampling(stop_strings=("x",)), GRPO(correction=None))
    other: Any = SimpleNamespace(can_stop=False)
    with pytest.raises(ValueError, match=r"cannot stop requests.*TailBatching"):
        Backlog(TailBatching()).check(other, Sampling(), GRPO())
    Backlog(None).check(other, Sampling(), GRPO())


def test_dynamic_sampling_goes_on_with_what_the_first_rollout_left() -> None:
    partial = run(PartialRollout(0.5), 1)
    waiting = {group.draw for group in partial.backlog.aside}
    groups, num_fresh = partial.backlog.begin(Demand(wanted=2, iteration=0, is_first=False), partial.log)
    assert {group.draw for group in groups} == waiting
    assert num_fresh == 0
    batched = run(TailBatching(0.25), 1)
    assert batched.backlog.begin(Demand(wanted=2, iteration=0, is_first=False), batched.log) == ([], 2)
    assert len(batched.backlog.aside) == 2


def test_what_was_put_aside_may_be_enough_without_a_rollout() -> None:
    response = Response(0, [7], [0.0], "stop", (0,))
    groups = [
        OpenGroup(prompt=draw, draw=draw, drawn=0, begun=0, responses=(response,) * SIZE if draw < 2 else ())
        for draw in range(3)
    ]
    course = RolloutCourse(PartialRollout(0.5), Demand(wanted=2, iteration=1), groups, SIZE)
    assert course.requests([[5]] * 3, 0) == []
    assert course.taken == list(range(2 * SIZE))
    assert [group.draw for group in course.put_aside()] == [2]


def test_a_group_that_got_no_seat_is_waited_for_like_one_that_was_begun() -> None:
    schedule = PartialRollout(0.5, 1)
    groups = [OpenGroup(prompt=draw, draw=draw, drawn=0, begun=0) for draw in range(2)]
    course = RolloutCourse(schedule, Demand(wanted=1, iteration=0), groups, 2)
    for number in range(4):
        tokens = [5] * (number < 2)
        course.add(Response(number, tokens, [0.0] * len(tokens), "stop" if tokens else "unfinished", (0,)))
    demand = Demand(wanted=1, iteration=1)
    taken_up, num_fresh = schedule.begin(demand, course.put_aside())
    assert [group.begun for group in taken_up] == [0]
    fresh = [OpenGroup(prompt=2, draw=2, drawn=1, begun=1)] * num_fresh
    assert schedule.choose(demand, [*taken_up, *fresh], [1]) is None
    assert schedule.choose(demand, [*taken_up, *fresh], [1, 0]) == [0]


def test_what_was_drawn_and_not_begun_ages_from_its_beginning_and_is_not_dropped() -> None:
    partial = run(PartialRollout(1.0, 5), 1)
    ended = [Response(i, [5, 1], [0.0, 0.0], "stop", (0,)) for i in range(SIZE)]
    partial.backlog.aside = [replace(group, responses=tuple(ended)) for group in partial.backlog.aside]
    partial.iterate(2)  # of eight that are put aside and whole
    assert len(partial.learned[-1]) == 2
    partial.backlog.aside = partial.backlog.aside[:1]
    partial.iterate(1)
    drawn = [group for group in partial.backlog.aside if not group.responses]
    assert [group.deferrals for group in drawn] == [1]
    assert partial.log.read()["schedule/dropped"] == ("mean", 0)
    taken_up, _ = partial.backlog.schedule.begin(Demand(wanted=1, iteration=3), drawn)
    assert [group.begun for group in taken_up] == [3]  # none of it is older
    num_steps = partial.num_steps
    partial.iterate(1)
    assert {group.draw for group in drawn} <= set(partial.learned[-1])
    assert partial.num_steps > num_steps
    assert {age for r in partial.learned[-1][drawn[0].draw] for age in r.policy_versions} == {3}
    assert partial.log.read()["schedule/dropped"] == ("mean", 0)


def test_the_example_of_a_custom_schedule_works() -> None:
    names: dict[str, Any] = {}
    exec(PLUGINS.read_text().split('title="my_schedule.py"\n')[1].split("```")[0], names)
    done = run(names["OneMore"](), 6)
    assert [len(iteration) for iteration in done.learned] == [8] * 6
    draws = [draw for iteration in done.learned for draw in iteration]
    left = [group.draw for group in done.backlog.aside]
    assert sorted(draws + left) == list(range(6 * 8 + 1))


class Wrong(SynchronousSchedule):
    """Begins and chooses what it is told to."""

    stops = True

    def __init__(self, num_fresh: int, chosen: list[int] | None) -> None:
        self.num_fresh, self.chosen = num_fresh, chosen

    def begin(self, demand: Demand, aside: Any) -> tuple[list[OpenGroup], int]:
        return [], self.num_fresh

    def choose(self, demand: Demand, groups: Any, complete: Any) -> list[int] | None:
        return self.chosen if len(complete) == 2 else None


@pytest.mark.parametrize(
    ("num_fresh", "chosen", "message"),
    [
        (1, [0, 1], r"`Wrong\.begin` takes up 0 groups and draws 1, and the rollout has to bring 2"),
        (-1, [0, 1], r"`Wrong\.begin` takes up 0 groups and draws -1"),
        (2, None, r"`Wrong\.choose` returned None to the end, with 2 of 2 groups complete"),
        (2, [0], r"`Wrong\.choose` returned \[0\]: .* 2, different places out of `complete`, \[[01], [01]\]"),
        (2, [0, 0], r"`Wrong\.choose` returned \[0, 0\]"),
        (2, [0, 7], r"`Wrong\.choose` returned \[0, 7\]"),
        (2, True, r"`Wrong\.choose` returned True: it has to return None"),
        (2, 0, r"`Wrong\.choose` returned 0: it has to return None"),
    ],
)
def test_what_a_schedule_of_ones_own_does_wrong_is_said_by_class_and_method(
    num_fresh: int, chosen: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        run(Wrong(num_fresh, chosen), 1, wanted=2)
