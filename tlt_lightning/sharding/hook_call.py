"""Let callbacks use a sharded policy only where all ranks do: in a hook that they call together, and equally often.

A pass by fewer ranks would wait without end, or meet a later pass of the others and mix up their weights. So a rank
notes in the ranks' store each pass that it begins in a hook, and that it has left the hook. Before a pass it waits for
the others, and one that has left is an error at once. Ranks that make no pass wait for nobody.
"""

from __future__ import annotations

import time
from collections import Counter
from contextvars import ContextVar
from typing import Self

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

_POLL_SECONDS = 0.002

_CURRENT: ContextVar[HookCall | None] = ContextVar("hook_call", default=None)
_NUM_CALLS: Counter[str] = Counter()  # of this process, by hook
_NUM_PASSES: Counter[str] = Counter()  # begun in them: as many on all ranks, whatever became of a call


class HookCall:
    """Guards one call of a hook on this rank, with a sharded policy; a context.

    Args:
        hook: Its name.
        is_even: All ranks call it equally often; otherwise a pass in it is refused.
    """

    def __init__(self, hook: str, *, is_even: bool) -> None:
        self.hook, self.is_even = hook, is_even
        self.callback = ""
        """Name of the callback that is being called."""
        self._num_passes = 0

    def __enter__(self) -> Self:
        if self.is_even:
            _NUM_CALLS[self.hook] += 1
        self._number = _NUM_CALLS[self.hook]
        self._token = _CURRENT.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        _CURRENT.reset(self._token)
        if self.is_even and dist.is_initialized():
            self._note(has_left=True)

    def begin_pass(self) -> None:
        """Wait until all ranks are at this pass; raise RuntimeError if the hook is uneven or a rank has left it."""
        if not self.is_even:
            raise RuntimeError(
                f"`{self.callback}` runs or gathers a policy in `{self.hook}`, which ranks call unequally often, and "
                "with `fsdp2` all ranks have to do so together: use `on_rollout_end` or `on_rollout_scored`, with as "
                "many passes on each rank, or `strategy: ddp`."
            )
        self._num_passes += 1
        _NUM_PASSES[self.hook] += 1
        self._note()
        while True:
            places = [self._place_of(rank) for rank in range(dist.get_world_size())]
            late = [rank for rank, (*_, num_passes) in enumerate(places) if num_passes < _NUM_PASSES[self.hook]]
            # A rank that has begun the pass may be anywhere: a GPU holds nobody up, another replica's shards neither.
            left = [str(rank) for rank in late if places[rank][:2] >= (self._number, True)]
            if left:
                _NUM_PASSES[self.hook] -= 1
                raise RuntimeError(
                    f"`{self.callback}` on rank {dist.get_rank()} runs or gathers a policy in `{self.hook}`, its "
                    f"{self._num_passes}. time, and rank {', '.join(left)} has left that hook without: with `fsdp2` "
                    "all ranks have to do so together. Make as many passes on each rank, or use `strategy: ddp`."
                )
            if not late:
                return
            time.sleep(_POLL_SECONDS)

    def _note(self, *, has_left: bool = False) -> None:
        place = f"{self._number} {has_left:d} {_NUM_PASSES[self.hook]}"
        _get_default_store().set(f"{self.hook} {dist.get_rank()}", place)

    def _place_of(self, rank: int) -> tuple[int, bool, int]:
        """Return a rank's calls of the hook, True if the last one is over, and the passes in all of them."""
        key = f"{self.hook} {rank}"
        if not _get_default_store().check([key]):
            return 0, False, 0
        number, has_left, num_passes = map(int, _get_default_store().get(key).split())
        return number, bool(has_left), num_passes


def begin_pass() -> None:
    """Meet the other ranks before a pass over a sharded policy, or its gathering, within a hook; nothing elsewhere."""
    if (call := _CURRENT.get()) is not None:
        call.begin_pass()
