"""Earlier answers to a prompt: whose lengths are remembered."""

from tlt_lightning.rollout import Response
from tlt_lightning.schedules.answer_lengths import AnswerLengths
from tlt_lightning.schedules.base import PendingGroup, RolloutDemand
from tlt_lightning.schedules.partial_rollout import PartialRollout
from tlt_lightning.schedules.under_way import RolloutUnderWay


def test_mean_lengths_are_those_of_the_last_answers_of_all_ranks() -> None:
    lengths = AnswerLengths()
    lengths.learn([(3, 1)], lambda own: [[(1, 2), (1, 1), (2, 1)], own])
    before = lengths.means
    assert before == {1: 1.5, 2: 1, 3: 1}
    lengths.learn([(2, 3)], lambda own: [own])
    assert lengths.means == {1: 1.5, 2: 3, 3: 1}
    assert before[2] == 1


def test_whatever_ended_tells_a_length() -> None:
    groups = [PendingGroup(prompt=number, draw=number, drawn_in=0, begun_in=0) for number in (6, 7)]
    course = RolloutUnderWay(PartialRollout(), RolloutDemand(wanted=1, iteration=1), groups, 2)
    for number, reason in ((14, "stop"), (15, "stop"), (12, "stop"), (13, "unfinished")):
        course.add(Response(number, [number], [0.0], reason, (0,)))
    assert sorted(course.lengths) == [(6, 1), (7, 1), (7, 1)]
