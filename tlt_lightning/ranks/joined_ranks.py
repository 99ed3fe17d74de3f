"""Let neighbouring ranks be one tensor-parallel engine: one decides what hangs on a clock, all follow.

Each rank runs vLLM's scheduler by itself, from the same requests, seeds and sampled tokens, so all schedule the same
steps and meet in the model's collectives. Only times differ. What depends on them travels from the first rank, on the
host and by gloo: nothing on the device waits for it, and a rank that is gone is an error at once. With it travels a
checksum of what the ranks have scheduled and written: one that has parted from the others is an error, too, and so is
one that does not come to a meeting because it runs a step that the others do not. One that is late is waited for.
"""

from __future__ import annotations

import atexit
import logging
import pickle
import signal
import time
import zlib
from array import array
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from itertools import zip_longest
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_process_group_store
from typing_extensions import override

from tlt_lightning.ranks.engine_ranks import EngineRanks
from tlt_lightning.ranks.rank_progress import RankProgress

T = TypeVar("T")

log = logging.getLogger(__name__)

_ROOM = 512  # bytes that travel in one broadcast with their number; a strategy takes some 130
_SIZE = 4  # bytes of a number
_HEADER = 2 * _SIZE
_STEP_SECONDS = 20.0  # between the ranks' steps; the liveness watch takes 35 more to end a rank that is stuck
_EXIT_SECONDS = 30
_LAST_SECONDS = 2.0  # for a meeting to end that a rank has only just come to


class JoinedRanks(EngineRanks):
    """Joins the ranks of the engine that lives in this process; every method is a collective of theirs.

    Args:
        group: Their process group on gloo.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.members = dist.get_process_group_ranks(group)
        self.num_ranks, self.index = len(self.members), dist.get_rank(group)
        self._noted = 0  # checksum
        self._progress = RankProgress(_get_process_group_store(group), self.index, self.num_ranks)

    @override
    def enter_rollout(self) -> None:
        super().enter_rollout()
        self._progress.begin()

    @override
    def begin_step(self) -> None:
        self._progress.num_steps += 1

    @override
    def leave_rollout(self) -> None:
        super().leave_rollout()
        self._progress.end()

    @override
    def decide(self, choose: Callable[[], T]) -> T:
        value, data = None, b""
        buffer = torch.zeros(_HEADER + _ROOM, dtype=torch.uint8)
        if self.is_first:
            value = choose()
            data = pickle.dumps(value)
            head = len(data).to_bytes(_SIZE, "little") + self._noted.to_bytes(_SIZE, "little") + data[:_ROOM]
            buffer[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        self._broadcast(buffer)
        if self.is_first:
            if len(data) > _ROOM:
                self._broadcast(torch.frombuffer(bytearray(data), dtype=torch.uint8))
            return value  # type: ignore[return-value]
        received = buffer.numpy().tobytes()
        size = int.from_bytes(received[:_SIZE], "little")
        if int.from_bytes(received[_SIZE:_HEADER], "little") != self._noted:
            raise self._parted()
        data = received[_HEADER : _HEADER + size]
        if size > _ROOM:
            whole = torch.empty(size, dtype=torch.uint8)
            self._broadcast(whole)
            data = whole.numpy().tobytes()
        return pickle.loads(data)

    def _broadcast(self, tensor: torch.Tensor) -> None:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        self._meet(lambda: self._group.broadcast([tensor], options))

    @override
    def gather(self, value: T) -> list[T]:
        values = [value] * self.num_ranks
        dist.all_gather_object(values, value, group=self._group)
        return values

    @override
    def is_any(self, flag: bool) -> bool:
        smallest, least, most = self.smallest(-flag, self._noted, -self._noted)
        if least != -most:
            raise self._parted()
        return smallest < 0

    @override
    def note(self, numbers: Iterable[int]) -> None:
        self._noted = zlib.crc32(array("q", numbers), self._noted)

    def smallest(self, *values: int) -> list[int]:
        """Return the smallest that a rank has of each value."""
        tensor = torch.tensor(values)
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MIN)
        self._meet(lambda: self._group.allreduce([tensor], options))
        return tensor.tolist()

    def _meet(self, start: Callable[[], dist.Work]) -> None:
        """Run a collective; in a rollout, raise RuntimeError if it does not end because ranks have parted."""
        if not self.in_rollout:
            start().wait()
            return
        work, began, is_told = start(), time.monotonic(), False
        self._progress.num_meetings += 1  # once it has begun: a rank that is held up before has not come
        while not _ends_within(_STEP_SECONDS, work):
            if parted := self._progress.find_parted():
                if _ends_within(_LAST_SECONDS, work):
                    return
                atexit.register(signal.alarm, _EXIT_SECONDS)  # gloo waits there for the meeting, which is still open
                raise RuntimeError(
                    f"Rank {self.members[self.index]} has waited {time.monotonic() - began:.0f} s between two steps "
                    f"of its engine for rank {', '.join(str(self.members[each]) for each in parted)}, with which it is "
                    f"one (`tensor_parallel` {self.num_ranks}): that runs a step that the others do not, or has left "
                    "the rollout. Set `engine.compare_steps` to hear of steps that part."
                )
            if not is_told:
                is_told = True
                log.warning(
                    "Rank %d has waited %.0f s between two steps of its engine for a rank that is held up, perhaps by "
                    "a callback, and waits on.",
                    self.members[self.index],
                    time.monotonic() - began,
                )

    def _parted(self) -> RuntimeError:
        return RuntimeError(
            f"Rank {self.members[self.index]} has scheduled or written other tokens than the ranks with which it is "
            f"one engine (`tensor_parallel` {self.num_ranks}). Set `engine.compare_steps` to hear at which step they "
            "part, and report this."
        )

    def check_same(self, what: str, facts: Sequence[Any]) -> None:
        """Raise RuntimeError on every rank unless all of them are at `what`, with the same facts."""
        own = [what, *facts]
        differing = next((row for row in zip_longest(*self.gather(own)) if any(fact != row[0] for fact in row)), None)
        if differing is not None:
            found = "; ".join(f"rank {rank}: {fact}" for rank, fact in zip(self.members, differing, strict=True))
            raise RuntimeError(
                f"The ranks of one engine (`tensor_parallel` {self.num_ranks}) have parted at the {what}, and would "
                f"wait for each other for ever. {found}. They must be given the same requests, sampling and seeds."
            )


def _ends_within(seconds: float, work: dist.Work) -> bool:
    """Wait for a collective that goes on meanwhile; raise the error that it ends with."""
    try:
        work.wait(timedelta(seconds=seconds))
    except RuntimeError:
        if not work.is_completed():
            return False
        work.wait()
    return True


def count_ranks() -> int:
    """Return the ranks of the run that this process belongs to."""
    return dist.get_world_size() if dist.is_initialized() else 1
