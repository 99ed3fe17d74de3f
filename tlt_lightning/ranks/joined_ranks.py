"""Let neighbouring ranks be one tensor-parallel engine: one decides what hangs on a clock, all follow.

Each rank runs vLLM's scheduler by itself, from the same requests, seeds and sampled tokens, so all schedule the same
steps and meet in the model's collectives. Only times differ. What depends on them travels from the first rank, on the
host and by gloo: nothing on the device waits for it, and a rank that is gone is an error at once. With it travels a
checksum of what the ranks have scheduled and written: one that has parted from the others is an error, too. One that
does not come to a meeting is waited for until the timeout of the process group.
"""

import pickle
import zlib
from array import array
from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from typing_extensions import override

from tlt_lightning.ranks.engine_ranks import EngineRanks

T = TypeVar("T")

_ROOM = 512  # bytes that travel in one broadcast with their number; a strategy takes some 130
_SIZE = 4  # bytes of a number
_HEADER = 2 * _SIZE


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
        self._group.broadcast([tensor], options).wait()

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
        self._group.allreduce([tensor], options).wait()
        return tensor.tolist()

    def _parted(self) -> RuntimeError:
        return RuntimeError(
            f"Rank {self.members[self.index]} has scheduled or written other tokens than the ranks with which it is "
            f"one engine (`tensor_parallel` {self.num_ranks}): report this, with the settings of the run."
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


def count_ranks() -> int:
    """Return the ranks of the run that this process belongs to."""
    return dist.get_world_size() if dist.is_initialized() else 1


def own_rank() -> int:
    """Return which of them this process is."""
    return dist.get_rank() if dist.is_initialized() else 0
