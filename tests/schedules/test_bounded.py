"""Schedules that bound the age of every token: simulated over random lengths, engines and delays."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from tlt_lightning import AsyncRollout, PartialRollout, RolloutSchedule, SynchronousSchedule
from tlt_lightning.metrics import IterationLog
from tlt_lightning.rollout import Response
from tlt_lightning.schedules.backlog import Backlog, pack
from tlt_lightning.schedules.base import PendingGroup, RolloutDemand
from tlt_lightning.schedules.under_way import RolloutUnderWay

SIZE = 2


class Engine:
    """Writes a token a step of up to `room` responses, whose lengths hang on their draw, and so on while they run."""

    def __init__(self, noise: random.Random, room: int) -> None:
        self.noise, self.room, self.version = noise, room, 0
        self.running: dict[int, list[int]] = {}  # by request, the version that wrote each token
        self.lengths: dict[int, int] = {}
        self.ended: list[Response] = []

    @property
    def open_ids(self) -> set[int]:
        return {*self.running, *(response.request_id for response in self.ended)}

    def ask(self, number: int, written: Response | None) -> None:
        before = () if written is None else written.segments
        self.running[number] = [version for version, count in before for _ in range(count)]
        self.lengths.setdefault(number, 1 + int(self.noise.lognormvariate(2.0, 1.2)))

    def step(self) -> None:
        for number in [*self.running][: self.room]:
            self.running[number].append(self.version)
            if len(self.running[number]) >= self.lengths[number]:
                self.ended.append(self.response(number, "stop"))

    def response(self, number: int, reason: str) -> Response:
        versions = self.running.pop(number)
        counts = {version: versions.count(version) for version in dict.fromkeys(versions)} or {self.version: 0}
        segments = {"policy_versions": tuple(counts), "version_tokens": tuple(counts.values())}
        return Response(number, range(len(versions)), [0.0] * len(versions), reason, **segments)


class Run:
    """Iterations of one rank; an engine that `runs_on` is never stopped, and takes steps while nobody reads."""

    def __init__(self, schedule: RolloutSchedule, seed: int, *, runs_on: bool = False, wanted: int = 4) -> None:
        self.noise = random.Random(seed)
        self.backlog, self.runs_on, self.wanted = Backlog(schedule), runs_on, wanted
        self.engine = Engine(self.noise, room=self.noise.choice((3, 8, 1000)))
        self.learned: list[int] = []  # by draw
        self.ages: list[int] = []  # of tokens
        self.position = self.iteration = 0
        self.most_open = 0

    def roll_out(self, wanted: int, *, is_first: bool = True) -> None:
        demand = RolloutDemand(wanted=wanted, iteration=self.iteration, is_first=is_first)
        groups, num_fresh = self.backlog.begin(demand, IterationLog())
        draws = range(self.position, self.position + num_fresh)
        new = [PendingGroup(prompt=i, draw=i, drawn_in=self.iteration, begun_in=self.iteration) for i in draws]
        self.position += num_fresh
        course = RolloutUnderWay(self.backlog.schedule, demand, [*groups, *new], SIZE)
        self.most_open = max(self.most_open, len(course.groups))
        for request in course.requests([[5]] * len(course.groups), ahead=self.runs_on):
            if request.id not in self.engine.open_ids:
                self.engine.ask(request.id, request.written)
        while not course.has_enough:
            while not self.engine.ended:
                assert self.engine.running, "no more will end, and the schedule has not enough"
                self.engine.step()
            course.add(self.engine.ended.pop(0))
        if not self.runs_on and self.backlog.schedule.stops:
            for response in self.engine.ended:
                course.add(response)
            self.engine.ended.clear()
            for number in [*self.engine.running]:
                course.add(self.engine.response(number, "unfinished"))
        taken = [course.responses[number] for number in course.taken]
        assert len(taken) == wanted * SIZE
        self.ages += [self.iteration - version for each in taken for version, count in each.segments if count]
        self.learned += [draw for place in course.chosen or () for draw in [course.groups[place].draw]]
        self.backlog.end(course, IterationLog())

    def iterate(self, *, dynamic: bool = False) -> None:
        self.engine.version = self.iteration  # weights are taken amid what runs
        self.roll_out(self.wanted)
        while dynamic and self.noise.random() < 0.5:
            self.roll_out(self.noise.randint(1, self.wanted), is_first=False)
        for _ in range(self.noise.choice((0, 3, 40)) if self.runs_on else 0):  # while the policy learns
            self.engine.step()
        self.iteration += 1

    def is_whole(self) -> bool:
        """True if every draw was learned from once, or waits."""
        return sorted(self.learned + [group.draw for group in self.backlog.deferred]) == list(range(self.position))


class WaitsForDue(PartialRollout):
    """The rule that is not enough: it waits for groups that are due now, and then takes what ended first."""

    def choose(
        self, demand: RolloutDemand, groups: Sequence[PendingGroup], complete: Sequence[int]
    ) -> Sequence[int] | None:
        due = {i for i, group in enumerate(groups) if demand.iteration - group.begun_in >= self.max_policy_lag}
        if len(complete) < demand.wanted or not due <= {*complete}:
            return None
        return sorted(sorted(complete, key=lambda place: place not in due)[: demand.wanted])


def run(schedule: RolloutSchedule, seed: int, num_iterations: int = 30, *, dynamic: bool = False, **other: bool) -> Run:
    made = Run(schedule, seed, **other)  # type: ignore[arg-type]
    for _ in range(num_iterations):
        made.iterate(dynamic=dynamic)
    return made


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("runs_on", [False, True])
@pytest.mark.parametrize("bound", [1, 2, 4])
def test_no_token_is_older_than_the_bound_and_every_draw_is_learned_from_once(
    bound: int, runs_on: bool, dynamic: bool
) -> None:
    oldest, most_open = 0, 0
    for seed in range(25):
        done = run(AsyncRollout(bound), seed, runs_on=runs_on, dynamic=dynamic)
        assert done.is_whole()
        assert len(done.learned) == 30 * 4 or dynamic
        oldest, most_open = max(oldest, *done.ages), max(most_open, done.most_open)
    assert oldest == bound
    assert most_open == 4 * (bound + 1)


@pytest.mark.slow
@pytest.mark.parametrize("runs_on", [False, True])
def test_to_wait_for_what_is_due_is_not_enough(runs_on: bool) -> None:
    def oldest(schedule: RolloutSchedule) -> int:
        schedule._extra = schedule._bound  # type: ignore[attr-defined]
        return max(max(run(schedule, seed, runs_on=runs_on).ages) for seed in range(25))

    WaitsForDue.begin = lambda self, demand, deferred: (  # type: ignore[method-assign, misc]
        list(deferred),
        max(0, (self.max_policy_lag + 1) * demand.wanted - len(deferred)),
    )
    assert oldest(PartialRollout(1.0, 4)) == 4
    assert oldest(WaitsForDue(1.0, 4)) > 4


def test_the_oldest_go_first_and_an_iteration_waits_for_what_would_come_too_late() -> None:
    schedule, demand = AsyncRollout(2), RolloutDemand(wanted=2, iteration=2)
    groups = [PendingGroup(prompt=i, draw=i, drawn_in=b, begun_in=b) for i, b in enumerate((1, 1, 1, 2, 2, 2))]
    assert schedule.choose(demand, groups, [4, 5]) is None  # three would be due in one iteration, which takes two
    assert schedule.choose(demand, groups, [4, 5, 2]) == [2, 4]
    assert schedule.choose(demand, groups, [4, 1, 0]) == [0, 1]
    late = [replace(group, begun_in=0) for group in groups[:2]]
    assert schedule.choose(demand, [*late, *groups[2:]], [3, 4, 0]) is None
    assert schedule.choose(demand, [*late, *groups[2:]], [3, 4, 0, 1]) == [0, 1]


def test_what_could_not_come_in_time_after_a_resume_on_fewer_ranks_is_begun_anew_or_waits() -> None:
    groups = [
        PendingGroup(
            prompt=i, draw=i, drawn_in=at, begun_in=at, responses=(Response(0, [5], [0.0], "stop", (at,)),) * SIZE
        )
        for i, at in enumerate((3, 3, 3, 4, 4, 4, 4))
    ]
    taken_up, num_fresh = AsyncRollout(1).begin(RolloutDemand(wanted=2, iteration=4), groups)
    # Two of the oldest are due now, then two of the younger; the others begin anew, as far as there is room.
    assert [(group.draw, group.begun_in, bool(group.responses)) for group in taken_up] == [
        (0, 3, True),
        (1, 3, True),
        (3, 4, True),
        (4, 4, True),
    ]
    assert num_fresh == 0
    taken_up, _ = AsyncRollout(1).begin(RolloutDemand(wanted=2, iteration=4), groups[:4])
    assert [(group.draw, group.begun_in) for group in taken_up if not group.responses] == [(2, 4)]
    # A further rollout takes some of what the first has left in time, and the next ones the rest.
    further = RolloutDemand(wanted=1, iteration=4, is_first=False)
    assert AsyncRollout(1).begin(further, groups[:4]) == (groups[:4], 0)
    done = Run(AsyncRollout(1), 0, wanted=2)
    done.backlog.deferred, done.position, done.iteration = groups, len(groups), 4
    for _ in range(6):
        done.iterate()
    assert done.is_whole()
    assert max(done.ages) <= 1


def test_with_no_staleness_and_on_an_engine_that_is_stopped_it_is_what_it_says() -> None:
    """Synchronous, and partial rollouts."""
    for ours, other in (
        (AsyncRollout(0), SynchronousSchedule()),
        (AsyncRollout(2, 0.0), SynchronousSchedule()),
        (AsyncRollout(2, 0.5), PartialRollout(0.5, 2)),
        (AsyncRollout(1), PartialRollout(1.0, 1)),
    ):
        mine, theirs = run(ours, 3), run(other, 3)
        assert (mine.learned, mine.ages, mine.position) == (theirs.learned, theirs.ages, theirs.position)
    assert AsyncRollout(1, 5.0).begin(RolloutDemand(wanted=4, iteration=0), ()) == ([], 8)  # what the bound allows
    flags = ("defers", "stops", "continues", "is_asynchronous")
    assert [getattr(AsyncRollout(0), flag) for flag in flags] == [False] * 4
    assert [getattr(AsyncRollout(1), flag) for flag in flags] == [True] * 4


def test_what_runs_is_saved_as_begun_and_what_was_put_aside_with_its_text() -> None:
    done = run(AsyncRollout(2), 1, 3, runs_on=True)
    waiting = [response for group in done.backlog.deferred for response in group.responses]
    running = {each.request_id for each in waiting if each.is_unfinished}
    assert running == done.engine.open_ids
    assert all(len(pack(group)["responses"]) == SIZE for group in done.backlog.deferred)
    stopped = [*done.engine.ended, *(done.engine.response(i, "unfinished") for i in [*done.engine.running])]
    done.backlog.put_aside(stopped)
    held = {each.request_id: each for group in done.backlog.deferred for each in group.responses}
    assert all(held[each.request_id] is each for each in stopped)
    assert len(held) == len(waiting)
