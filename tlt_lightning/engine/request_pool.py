"""Pool the requests of the ranks that are one engine, and give each of them its own responses."""

from collections.abc import Collection, Sequence
from dataclasses import replace

from tlt_lightning.ranks.engine_ranks import EngineRanks
from tlt_lightning.rollout import Request, Response


class RequestPool:
    """Holds the requests and stops of the callers of an engine's ranks until all ranks meet.

    Every rank writes all requests of its engine, because it has a part of each weight; its caller sees its own. Numbers
    of requests and groups are told apart by the rank: ``number * ranks + rank``.

    Args:
        engine_ranks: The ranks of the engine, whose callers ask for these requests.
    """

    def __init__(self, engine_ranks: EngineRanks) -> None:
        self.engine_ranks = engine_ranks
        self._added: list[Request] = []
        self._stopped: set[int] = set()

    def add(self, requests: Sequence[Request]) -> None:
        """Ask for these requests of this rank."""
        self._added += requests

    def stop(self, ids: Collection[int]) -> None:
        """Ask that these requests of this rank end unfinished."""
        self._stopped |= {*ids}

    @property
    def added(self) -> set[int]:
        """Ids of this rank's requests that no meeting has taken up."""
        return {request.id for request in self._added}

    @property
    def asks_alone(self) -> bool:
        """True if a lone rank asks for something; several meet only where a response has ended."""
        return self.engine_ranks.num_ranks == 1 and bool(self._added or self._stopped)

    def meet(self) -> tuple[list[Request], set[int]]:
        """Return requests and stops that all ranks have asked for since they last met, the same on all of them."""
        new_requests: list[Request] = []
        stopped_ids: set[int] = set()
        ranks = self.engine_ranks.num_ranks
        if self.engine_ranks.is_any(bool(self._added or self._stopped)):
            for rank, (added, stopped) in enumerate(self.engine_ranks.gather((self._added, self._stopped))):
                new_requests += [
                    replace(each, id=each.id * ranks + rank, group=each.group * ranks + rank) for each in added
                ]
                stopped_ids |= {number * ranks + rank for number in stopped}
        self.clear()
        return new_requests, stopped_ids

    def of_this_rank(self, ids: Collection[int]) -> list[int]:
        """Return those of the pooled ids that are this rank's, by its own numbers."""
        ranks, rank = self.engine_ranks.num_ranks, self.engine_ranks.index
        return [number // ranks for number in ids if number % ranks == rank]

    def responses_of_this_rank(self, responses: Sequence[Response]) -> list[Response]:
        """Return this rank's of the responses to pooled requests, by its own numbers."""
        ranks, rank = self.engine_ranks.num_ranks, self.engine_ranks.index
        these = [each for each in responses if each.request_id % ranks == rank]
        return these if ranks == 1 else [replace(each, request_id=each.request_id // ranks) for each in these]

    def clear(self) -> None:
        """Forget the requests and stops that no meeting has taken up."""
        self._added, self._stopped = [], set()
