"""How far each rank of an engine has come, told in a store."""

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from tlt_lightning.ranks.joined_ranks import JoinedRanks
from tlt_lightning.ranks.rank_progress import RankProgress


@pytest.mark.parametrize(
    ("others", "parted"),
    [
        ([(7, 4), (8, 4)], []),  # both are late, the second within the step that this one has begun, too
        ([(9, 4), (8, 5)], [1]),  # has begun another step without the meeting
        ([(9, 5), (8, 4)], []),  # the first has been there and gone on; the second is late, and holds this one up
        ([(9, 5), (8, 5)], [1, 2]),  # all have come, and it does not end
        ([(9, 4), (7, 4)], [1]),
        ([None, (8, 5)], []),
    ],
)
def test_a_rank_that_has_parted_is_told_from_one_that_is_late(others: list[tuple[int, int]], parted: list[int]) -> None:
    store = dist.HashStore()
    ranks = [RankProgress(store, index, 3) for index in range(3)]
    ranks[0].num_steps, ranks[0].num_meetings = 8, 5
    for rank, numbers in zip(ranks[1:], others, strict=True):
        if numbers is not None:
            rank.num_steps, rank.num_meetings = numbers
            rank.tell()
    assert ranks[0].find_parted() == parted


def test_a_rank_tells_of_itself_while_it_waits_and_when_it_leaves() -> None:
    store = dist.HashStore()
    mine, other = (RankProgress(store, index, 2) for index in range(2))
    for _ in range(2):  # rollouts
        for rank in (mine, other):
            rank.begin()
        mine.num_meetings += 1
        assert mine.find_parted() == []
        other.num_steps += 1  # without the meeting
        ends = time.monotonic() + 30
        while not mine.find_parted() and time.monotonic() < ends:
            time.sleep(0.05)
        assert mine.find_parted() == [1]
        other.num_meetings, mine.num_steps = mine.num_meetings + 1, other.num_steps
        for _ in range(2):
            mine.end()
        assert other.find_parted() == [0]
        mine.num_meetings = other.num_meetings
        other.end()
        assert mine.num_steps == other.num_steps


def test_a_rank_has_come_to_a_meeting_once_that_has_begun() -> None:
    group: Any = JoinedRanks.__new__(JoinedRanks)
    group.in_rollout, group._progress = True, RankProgress(dist.HashStore(), 0, 2)
    before: list[int] = []

    def start() -> Any:
        before.append(group._progress.num_meetings)
        return SimpleNamespace(wait=lambda *_: True)

    group._meet(start)
    assert before == [0]
    assert group._progress.num_meetings == 1
