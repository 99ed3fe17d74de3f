"""Requests of two callers of one engine, as its second rank sees them."""

from typing import Any

from tlt_lightning.engine.request_pool import RequestPool
from tlt_lightning.ranks.engine_ranks import EngineRanks
from tlt_lightning.rollout import Request, Response


class SecondOfTwo(EngineRanks):
    """The other rank asks for `asked`, and to stop `stopped`."""

    num_ranks, index = 2, 1

    def __init__(self) -> None:
        self.asked: list[Request] = []
        self.stopped: set[int] = set()

    def gather(self, value: Any) -> list[Any]:
        return [(self.asked, self.stopped), value]

    def is_any(self, flag: bool) -> bool:
        return flag or bool(self.asked or self.stopped)


def test_requests_of_the_same_number_are_told_apart_and_each_caller_gets_its_own() -> None:
    ranks = SecondOfTwo()
    pool = RequestPool(ranks)
    pool.add([Request(id=-3, prompt_ids=[5], group=-1), Request(id=4, prompt_ids=[5], group=2)])
    pool.stop([4])
    assert pool.added == {-3, 4}
    ranks.asked, ranks.stopped = [Request(id=4, prompt_ids=[6], group=2)], {7}
    requests, stopped = pool.meet()
    assert [(each.id, each.group, each.prompt_ids) for each in requests] == [(8, 4, [6]), (-5, -1, [5]), (9, 5, [5])]
    assert stopped == {14, 9}
    assert pool.of_this_rank([8, -5, 9]) == [-3, 4]
    responses = [Response(each.id, each.prompt_ids, [-1.0], "stop", (0,)) for each in requests]
    own = pool.responses_of_this_rank(responses)
    assert [(each.request_id, each.token_ids) for each in own] == [(-3, [5]), (4, [5])]
    ranks.asked, ranks.stopped = [], set()
    assert pool.meet() == ([], set())  # what was taken up is not asked for again


def test_a_lone_rank_keeps_its_numbers_and_asks_when_it_wants_to() -> None:
    pool = RequestPool(EngineRanks())
    assert not pool.asks_alone
    pool.stop([4])
    assert pool.asks_alone
    pool.meet()
    pool.add([Request(id=3, prompt_ids=[5])])
    assert pool.asks_alone
    assert pool.meet() == ([Request(id=3, prompt_ids=[5])], set())
    crowd = RequestPool(SecondOfTwo())
    crowd.add([Request(id=3, prompt_ids=[5])])
    assert not crowd.asks_alone
