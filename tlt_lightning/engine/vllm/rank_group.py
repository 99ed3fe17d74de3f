"""Let neighbouring ranks be one tensor-parallel engine: one decides what hangs on a clock, all follow.

Each rank runs vLLM's scheduler by itself, from the same requests, seeds and sampled tokens, so all schedule the same
steps and meet in the model's collectives. Only times differ. What depends on them travels from the first rank, on the
host and by gloo: nothing on the device waits for it, and a rank that is gone is an error at once.
"""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from typing_extensions import override

from tlt_lightning.engine.architectures import check_divides
from tlt_lightning.engine.vllm import internals
from tlt_lightning.speculation.agreement import ALONE, Agreement

if TYPE_CHECKING:
    from vllm.v1.engine.llm_engine import LLMEngine

    from tlt_lightning.engine.vllm.graphs import PlannedGraphs

T = TypeVar("T")

_ROOM = 512  # bytes that travel in one broadcast with their number; a strategy takes some 130
_HEADER = 4


class RankGroup(Agreement):
    """Joins the ranks of the engine that lives in this process; every method is a collective of theirs."""

    def __init__(self) -> None:
        from vllm.distributed import parallel_state

        group = internals.reach(parallel_state, "get_tp_group")()
        self.ranks: list[int] = group.ranks
        self.index: int = group.rank_in_group
        self.is_first = self.index == 0
        self._group: dist.ProcessGroup = group.cpu_group

    @override
    def decide(self, choose: Callable[[], T]) -> T:
        value, data = None, b""
        buffer = torch.zeros(_HEADER + _ROOM, dtype=torch.uint8)
        if self.is_first:
            value = choose()
            data = pickle.dumps(value)
            head = len(data).to_bytes(_HEADER, "little") + data[:_ROOM]
            buffer[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        self._broadcast(buffer)
        if self.is_first:
            if len(data) > _ROOM:
                self._broadcast(torch.frombuffer(bytearray(data), dtype=torch.uint8))
            return value  # type: ignore[return-value]
        received = buffer.numpy().tobytes()
        size = int.from_bytes(received[:_HEADER], "little")
        data = received[_HEADER : _HEADER + size]
        if size > _ROOM:
            whole = torch.empty(size, dtype=torch.uint8)
            self._broadcast(whole)
            data = whole.numpy().tobytes()
        return pickle.loads(data)  # type: ignore[no-any-return]

    def _broadcast(self, tensor: torch.Tensor) -> None:
        dist.broadcast(tensor, src=self.ranks[0], group=self._group)

    def smallest(self, value: int) -> int:
        """Return the smallest of the ranks' values."""
        tensor = torch.tensor(value)
        dist.all_reduce(tensor, op=dist.ReduceOp.MIN, group=self._group)
        return int(tensor)

    def check_same(self, what: str, facts: Sequence[Any]) -> None:
        """Raise RuntimeError on every rank unless all of them are at `what`, with the same facts."""
        own = [what, *facts]
        by_rank: list[list[Any]] = [own] * len(self.ranks)
        dist.all_gather_object(by_rank, own, group=self._group)
        differing = next((row for row in zip_longest(*by_rank) if any(fact != row[0] for fact in row)), None)
        if differing is not None:
            found = "; ".join(f"rank {rank}: {fact}" for rank, fact in zip(self.ranks, differing, strict=True))
            raise RuntimeError(
                f"The ranks of one engine (`tensor_parallel` {len(self.ranks)}) have parted at the {what}, and would "
                f"wait for each other for ever. {found}. They must be given the same requests, sampling and seeds."
            )


def count_ranks() -> int:
    """Return the ranks of the run that this process belongs to."""
    return dist.get_world_size() if dist.is_initialized() else 1


def check_split(policy: str, head: str | None, num_ranks: int) -> None:
    """Raise ValueError unless the run's ranks, the policy and its head (paths) split into engines of `num_ranks`."""
    world_size = count_ranks()
    if world_size % num_ranks:
        raise ValueError(
            f"`tensor_parallel` {num_ranks} makes one engine of so many neighbouring ranks, and does not divide the "
            f"{world_size} of this run: start more (`Trainer(devices=..., strategy='ddp')`), or choose a divisor."
        )
    check_divides(policy, head, num_ranks)


def join_ranks(
    engine: LLMEngine, graphs: PlannedGraphs | None, *, compare: bool
) -> tuple[Agreement, StepComparison | None]:
    """Return the agreement of a started engine's ranks, and with `compare` what compares their steps.

    Raises:
        RuntimeError: The ranks have not equal caches and plans of CUDA graphs.
    """
    group = RankGroup()
    if len(group.ranks) == 1:
        return ALONE, None
    cache = internals.reach(engine, "vllm_config.cache_config")
    planned = None if graphs is None else zlib.crc32(repr(graphs.plan).encode())
    facts = (f"{cache.num_gpu_blocks} blocks of cache", f"checksum of planned CUDA graphs {planned}")
    group.check_same("start of the engine", facts)
    return group, StepComparison(engine, group) if compare else None


class StepComparison:
    """Compares what the ranks of an engine schedule, before any of them runs it.

    Args:
        engine: Started on all of them.
        group: The ranks.
    """

    def __init__(self, engine: LLMEngine, group: RankGroup) -> None:
        self._group, self._scheduler = group, internals.scheduler_of(engine)
        internals.reach(engine, "engine_core.engine_core.model_executor").on_step = self.step

    def step(self, output: Any) -> None:
        """Compare a step's strategy and, of each request, tokens to run, drafts among them and tokens known."""
        record = getattr(output, "speculation", None)
        facts: list[Any] = [None if record is None else record.plan.drafts]
        requests, drafts = self._scheduler.requests, output.scheduled_spec_decode_tokens
        for request_id, count in output.num_scheduled_tokens.items():
            known = requests[request_id].all_token_ids
            name = request_id.rpartition("-")[0]  # vLLM appends letters at random
            verified = len(drafts.get(request_id, ()))
            facts.append(
                f"request {name}: {count} tokens, {verified} of them drafts, after {len(known)} to {known[-1]}"
            )
        self._group.check_same("next engine step", facts)

    def end(self) -> None:
        """Compare that a rollout is over."""
        self._group.check_same("end of a rollout", ())
