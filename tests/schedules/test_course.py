"""One rollout under its schedule, response by response, and what a backlog says of it."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tlt_lightning import PartialRollout, SynchronousSchedule, TailBatching
from tlt_lightning.metrics import IterationLog
from tlt_lightning.rollout import Response
from tlt_lightning.schedules.base import Demand, OpenGroup, choice_of
from tlt_lightning.schedules.course import Backlog, RolloutCourse


def group(draw: int, *responses: Response, begun: int = 0) -> OpenGroup:
    return OpenGroup(prompt=draw, draw=draw, drawn=0, begun=begun, responses=responses)


def response(number: int, tokens: Sequence[int] = (5, 1), reason: str = "stop") -> Response:
    return Response(number, tokens, [0.0] * len(tokens), reason, (0,))


class LastEnded(SynchronousSchedule):
    """Would choose others with each group that ends."""

    stops = True

    def choose(self, demand: Demand, groups: Sequence[OpenGroup], complete: Sequence[int]) -> list[int] | None:
        return list(complete[-demand.wanted :])


def test_the_engine_is_stopped_once_and_the_choice_stands_whatever_ends_before_it_has() -> None:
    course = RolloutCourse(LastEnded(), Demand(wanted=1, iteration=0), [group(0), group(1), group(2)], 1)
    assert not course.add(response(2, reason="unfinished"))
    assert [course.add(response(number)) for number in (1, 0, 2)] == [True, False, False]
    assert course.taken == [1]


def test_a_rollout_to_the_end_stops_nothing_and_logs_nothing_of_what_waits() -> None:
    backlog, log = Backlog(SynchronousSchedule()), IterationLog()
    groups, num_fresh = backlog.begin(demand := Demand(wanted=2, iteration=0), log)
    assert (groups, num_fresh) == ([], 2)
    course = RolloutCourse(backlog.schedule, demand, [group(0), group(1)], 1)
    assert not any(course.add(response(number)) for number in (1, 0))
    backlog.end(course, log)
    assert course.taken == [0, 1]
    assert log.read() == {}


def test_what_was_written_again_is_compared_response_by_response() -> None:
    backlog, log = Backlog(TailBatching()), IterationLog()
    backlog.aside = [group(3, response(0, [5, 6, 7, 8]), response(1, [2, 9], "unfinished"), begun=0)]
    groups, _ = backlog.begin(demand := Demand(wanted=1, iteration=1), log)
    course = RolloutCourse(backlog.schedule, demand, groups, 2)
    for number, tokens in enumerate(([5, 6, 4], [2, 9, 9])):
        course.add(response(number, tokens))
    backlog.end(course, log)
    assert log.read()["schedule/repeated"] == ("mean", (0.5 + 1) / 2)


class TakesAll(SynchronousSchedule):
    def begin(self, demand: Demand, aside: Sequence[OpenGroup]) -> tuple[list[OpenGroup], int]:
        return list(aside), demand.wanted - len(aside)


def test_a_schedule_that_draws_fewer_than_none_is_refused_though_its_sum_is_right() -> None:
    backlog = Backlog(TakesAll())
    backlog.aside = [group(0), group(1), group(2)]
    with pytest.raises(ValueError, match=r"`TakesAll\.begin` takes up 3 groups and draws -1"):
        backlog.begin(Demand(wanted=2, iteration=0), IterationLog())


@pytest.mark.parametrize(
    ("begin", "error", "message"),
    [
        (lambda aside: None, TypeError, "has to return a pair, .* got None"),
        (lambda aside: list(aside), TypeError, "has to return a pair"),
        (lambda aside: (aside, 2.0), TypeError, "a whole number"),
        (lambda aside: ([aside[0], aside[0]], 2), ValueError, "out of `aside`, each once"),
        (lambda aside: ([group(9)], 2), ValueError, "out of `aside`, each once"),
        (lambda aside: ([0, 1], 2), ValueError, "out of `aside`, each once"),
        (lambda aside: ([aside.pop()], 2), AttributeError, "'tuple' object has no attribute 'pop'"),
    ],
)
def test_what_a_schedule_takes_up_is_checked(begin: Callable[[Any], Any], error: type[Exception], message: str) -> None:
    """A group that is taken up twice would be answered twice with the same noise; `aside` itself is not its own."""

    class Mine(SynchronousSchedule):
        def begin(self, demand: Demand, aside: Sequence[OpenGroup]) -> Any:
            return begin(aside)

    backlog = Backlog(Mine())
    backlog.aside = [group(0), group(1)]
    with pytest.raises(error, match=message) as raised:
        backlog.begin(Demand(wanted=2, iteration=1), IterationLog())
    assert error is AttributeError or "`Mine.begin`" in str(raised.value)
    assert len(backlog.aside) == 2


def test_partial_rollouts_choose_as_soon_as_what_is_due_is_whole_and_then_by_the_order_of_ends() -> None:
    choose, demand = PartialRollout(0.5, 2).choose, Demand(wanted=2, iteration=2)
    fresh = [group(draw, begun=1) for draw in range(4)]
    assert choose(demand, [*fresh, group(4, begun=0)], [3, 2]) is None
    assert choose(demand, [*fresh, group(4, begun=0)], [3, 2, 4]) == [3, 4]
    both_due = [group(0, begun=0), group(1, begun=0), *fresh[2:]]
    assert choose(demand, both_due, [1, 0]) == [0, 1]  # in order, whichever ended first


def test_a_choice_is_checked_without_a_search_for_each_place() -> None:
    class Complete(tuple):  # of many thousand groups in a validation
        __slots__ = ()

        def __contains__(self, place: object) -> bool:
            raise AssertionError("searched")

    groups, demand = [group(draw) for draw in range(3)], Demand(wanted=3, iteration=0)
    assert choice_of(SynchronousSchedule(), demand, groups, Complete((2, 0, 1))) == [0, 1, 2]


def test_tail_batching_learns_from_the_first_to_end_in_the_order_of_their_places() -> None:
    choose = TailBatching().choose
    assert choose(Demand(wanted=2, iteration=0), [group(draw) for draw in range(4)], [3, 1]) == [1, 3]
