"""One rollout under its schedule, response by response, and what a backlog says of it."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from tlt_lightning import PartialRollout, SynchronousSchedule, TailBatching
from tlt_lightning.metrics import IterationLog
from tlt_lightning.rollout import Request, Response
from tlt_lightning.schedules.backlog import Backlog
from tlt_lightning.schedules.base import PendingGroup, RolloutDemand
from tlt_lightning.schedules.under_way import RolloutUnderWay


def group(draw: int, *responses: Response, begun: int = 0) -> PendingGroup:
    return PendingGroup(prompt=draw, draw=draw, drawn_in=0, begun_in=begun, responses=responses)


def response(number: int, tokens: Sequence[int] = (5, 1), reason: str = "stop") -> Response:
    return Response(number, tokens, [0.0] * len(tokens), reason, (0,))


class LastEnded(SynchronousSchedule):
    """Would choose others with each group that ends."""

    stops = True

    def choose(self, demand: RolloutDemand, groups: Sequence[PendingGroup], complete: Sequence[int]) -> list[int]:
        return list(complete[-demand.wanted :])


def test_each_response_has_noise_of_its_own_the_same_wherever_its_group_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Siblings of the same noise would be the same text, from which nothing is learned."""
    groups = [group(0), replace(group(3), expected_tokens=7.5)]

    def requests(*places: int) -> list[Request]:
        demand = RolloutDemand(wanted=len(places), iteration=0)
        course = RolloutUnderWay(SynchronousSchedule(), demand, [groups[place] for place in places], 2)
        return course.requests([[5]] * len(places), has_seeds=True)

    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    both = requests(0, 1)
    assert [request.expected_tokens for request in both] == [0.0, 0.0, 7.5, 7.5]
    assert requests(1) == both[2:]
    monkeypatch.setenv("PL_GLOBAL_SEED", "1")
    assert len({request.seed for request in (*both, *requests(0, 1))}) == 8


def test_the_engine_is_stopped_once_and_the_choice_stands_whatever_ends_before_it_has() -> None:
    course = RolloutUnderWay(LastEnded(), RolloutDemand(wanted=1, iteration=0), [group(0), group(1), group(2)], 1)
    assert not course.add(response(2, reason="unfinished"))
    assert [course.add(response(number)) for number in (1, 0, 2)] == [True, False, False]
    assert course.taken == [1]
    assert [(each.draw, each.deferrals) for each in course.deferred()] == [(0, 1), (2, 1)]


def test_a_rollout_to_the_end_stops_nothing_and_logs_nothing_of_what_waits() -> None:
    backlog, log = Backlog(SynchronousSchedule()), IterationLog()
    groups, num_fresh = backlog.begin(demand := RolloutDemand(wanted=2, iteration=0), log)
    assert (groups, num_fresh) == ([], 2)
    course = RolloutUnderWay(backlog.schedule, demand, [group(0), group(1)], 1)
    assert not any(course.add(response(number)) for number in (1, 0))
    backlog.end(course, log)
    assert course.taken == [0, 1]
    assert log.read() == {}


def test_partial_rollouts_choose_as_soon_as_what_is_due_is_whole_and_then_by_the_order_of_ends() -> None:
    choose, demand = PartialRollout(0.5, 2).choose, RolloutDemand(wanted=2, iteration=2)
    fresh = [group(draw, begun=1) for draw in range(4)]
    assert choose(demand, [*fresh, group(4, begun=0)], [3, 2]) is None
    assert choose(demand, [*fresh, group(4, begun=0)], [3, 2, 4]) == [3, 4]
    both_due = [group(0, begun=0), group(1, begun=0), *fresh[2:]]
    assert choose(demand, both_due, [1, 0]) == [0, 1]  # in order, whichever ended first


def test_weights_are_remembered_as_long_as_what_they_began_waits() -> None:
    backlog = Backlog(PartialRollout())
    backlog.written_in = {0: 2, 4: 3, 8: 4, 12: 5}
    backlog.deferred = [group(0, begun=4), group(1, begun=3)]
    backlog.note_weights(16, 6)
    assert backlog.written_in == {4: 3, 8: 4, 12: 5, 16: 6}
    backlog.deferred = []
    backlog.note_weights(20, 7)
    assert backlog.written_in == {20: 7}


def test_tail_batching_starts_those_with_the_shortest_earlier_answers_and_waits_for_all() -> None:
    tail, demand = TailBatching(0.5), RolloutDemand(wanted=3, iteration=0)
    assert tail.begin(demand, [group(0), group(1)]) == ([], 5)
    some_rank_has_less = replace(demand, least_deferred=2)
    assert tail.begin(some_rank_has_less, [group(draw) for draw in range(3)]) == ([], 5)
    groups = [replace(group(draw), expected_tokens=tokens) for draw, tokens in enumerate((30.0, 0.0, 10.0, 50.0, 20.0))]
    assert tail.start(demand, groups) == [1, 2, 4]  # the unknown one counts as 27.5
    groups = [replace(groups[0], expected_tokens=25.0), *groups[1:]]
    assert tail.start(demand, groups) == [0, 2, 4]  # and as 26.25, with itself left out
    assert tail.start(demand, [group(draw) for draw in range(5)]) == [0, 1, 2]  # in a first pass nothing is known
    assert tail.choose(demand, groups[:3], [2, 0]) is None
    assert list(tail.choose(demand, groups[:3], [2, 0, 1]) or ()) == [0, 1, 2]
    waiting = [group(draw, response(0)) for draw in range(4)]
    again, num_fresh = tail.begin(RolloutDemand(wanted=3, iteration=1), waiting)
    assert ([each.draw for each in again], num_fresh) == ([0, 1, 2], 0)
    assert [each.responses for each in again] == [()] * 3  # what another schedule began is written anew


def test_requests_of_ranks_that_write_everything_are_apart_and_none_of_trainings() -> None:
    draws = [[group.draw for group in RolloutUnderWay.of_all(3, 2, rank=rank, num_ranks=2).groups] for rank in (0, 1)]
    assert draws == [[-1, -3, -5], [-2, -4, -6]]  # in turn, as prompts are dealt


def test_what_is_not_started_waits_unwritten() -> None:
    backlog, demand = Backlog(TailBatching(1.0)), RolloutDemand(wanted=1, iteration=0)
    groups = [replace(group(0), expected_tokens=9.0), replace(group(1), expected_tokens=5.0)]
    assert backlog.start(demand, groups) == groups[1:]
    assert backlog.deferred == [replace(groups[0], deferrals=1)]
