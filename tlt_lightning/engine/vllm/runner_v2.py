"""The drafter of vLLM's V2 model runner, the GPU's default: skips passes, takes lookups, never waits for the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tlt_lightning.engine.vllm.internals import reach
from tlt_lightning.engine.vllm.kv_catch_up import DrafterBacklog
from tlt_lightning.speculation.strategy import Strategy


@dataclass(frozen=True, slots=True)
class Lookup:
    """What a text said after the words a request had written when the host last heard of it.

    Args:
        num_known: Tokens of the request (prompt and response) known to the host.
        continuation: What may follow them.
    """

    num_known: int
    continuation: list[int]


LookUp = Callable[[list[str]], Mapping[str, Lookup]]


class V2Drafter:
    """Steers the speculator of a V2 model runner.

    The host runs one to two steps ahead of the device, so it looks up continuations of texts whose last tokens it does
    not know yet. The device, which knows them, keeps a continuation only where it begins with these very tokens, and
    drafts what comes next in it. Nothing waits.

    Args:
        runner: The model runner.
        has_head: True if its speculator is a learned head; otherwise it only stands in.
        defers: Keep what a skipped head misses and catch up later; without it the requests must be read again.
        strategy: Tells under which strategy the step being launched drafts.
        look_up: Continuations for requests of the step; None without lookups.
    """

    def __init__(
        self,
        runner: Any,
        *,
        has_head: bool,
        defers: bool,
        strategy: Callable[[], Strategy],
        look_up: LookUp | None,
    ) -> None:
        self.runner = runner
        self.speculator = reach(runner, "speculator")
        self.states = reach(runner, "req_states")
        self.has_head = has_head
        self.backlog = None
        if has_head and defers:
            self.backlog = DrafterBacklog(self.model, reach(runner, "max_num_reqs"))
        self.num_skipped = 0
        self.has_holes = False
        self._defers = defers
        self._strategy, self._look_up = strategy, look_up
        self._drafts = torch.zeros_like(reach(self.states, "draft_tokens"))
        self._group, self._block_size = self._find_cache() if has_head else (0, 0)
        self._propose = reach(self.speculator, "propose")
        self.speculator.propose = self.propose

    @property
    def model(self) -> Any:
        """The drafter's module."""
        return reach(self.speculator, "model")

    def _find_cache(self) -> tuple[int, int]:
        """Which of the runner's block tables the head's cache uses, and the tokens a block holds."""
        layers = reach(self.speculator, "draft_attn_layer_names")
        groups = reach(self.speculator, "kv_cache_config.kv_cache_groups")
        index = next(index for index, group in enumerate(groups) if layers & set(group.layer_names))
        return index, reach(self.speculator, "block_tables.block_sizes")[index]

    def propose(
        self,
        input_batch: Any,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: Tensor,
        aux_hidden_states: list[Tensor] | None,
        num_sampled: Tensor,
        num_rejected: Tensor,
        last_sampled: Tensor,
        next_prefill_tokens: Tensor,
        temperature: Tensor,
        seeds: Tensor,
        *,
        num_speculative_tokens: int | None = None,
        dummy_run: bool = False,
        **rest: Any,
    ) -> Tensor:
        """Drafts for each request, (B, longest draft); stands in front of the speculator's own `propose`."""
        strategy = self._strategy()
        is_learned = strategy.is_learned
        drafts = self._drafts[: input_batch.num_reqs]
        if dummy_run or self._must_run(input_batch, is_learned):
            if self.backlog is not None and not dummy_run:
                self._catch_up()
            drafts = self._propose(
                input_batch,
                attn_metadata,
                slot_mappings,
                last_hidden_states,
                aux_hidden_states,
                num_sampled,
                num_rejected,
                last_sampled,
                next_prefill_tokens,
                temperature,
                seeds,
                num_speculative_tokens=num_speculative_tokens if is_learned or dummy_run else 0,
                dummy_run=dummy_run,
                **rest,
            )
        elif self.has_head:
            self._miss(input_batch, aux_hidden_states, last_sampled)
        if dummy_run or strategy.is_off:
            return drafts
        if not is_learned:
            drafts.copy_(last_sampled.view(-1)[input_batch.idx_mapping][:, None])  # any token will do: it is verified
        return (
            drafts if self._look_up is None else self._splice(input_batch, drafts, self._look_up(input_batch.req_ids))
        )

    def _must_run(self, input_batch: Any, is_learned: bool) -> bool:
        if not self.has_head:
            return False
        is_plain_decode = not input_batch.has_prefill and int(input_batch.num_scheduled_tokens.max()) == 1
        return is_learned or (self._defers and not is_plain_decode)

    def _miss(self, input_batch: Any, aux_hidden_states: list[Tensor] | None, last_sampled: Tensor) -> None:
        self.num_skipped += 1
        if self.backlog is None:
            self.has_holes = True
            return
        rows = input_batch.num_reqs
        if not self.backlog.has_room(rows):
            self._catch_up()
        assert aux_hidden_states is not None
        self.backlog.add(
            input_batch.req_ids,
            [hidden[:rows] for hidden in aux_hidden_states],
            last_sampled.view(-1),
            input_batch.positions[:rows],
            input_batch.idx_mapping,
        )

    def _catch_up(self) -> None:
        if self.backlog is None or not len(self.backlog):
            return
        table = self.speculator.block_tables.block_tables[self._group].gpu
        size = self._block_size

        def slots_of(rows: Tensor, positions: Tensor) -> Tensor:
            return table[rows, positions // size].long() * size + positions % size

        self.backlog.flush(self.states.req_id_to_index, slots_of)

    def _splice(self, input_batch: Any, drafts: Tensor, lookups: Mapping[str, Lookup]) -> Tensor:
        if not lookups:
            return drafts
        packed = torch.from_numpy(pack_lookups(input_batch.req_ids, lookups))
        if drafts.is_cuda:
            packed = packed.pin_memory().to(drafts.device, non_blocking=True)
        rows = input_batch.idx_mapping
        width = packed.shape[1] - 2
        known = packed[:, 0]
        last = self.states.all_token_ids.gpu.shape[1] - 1
        columns = (known[:, None] + torch.arange(width, device=packed.device)).clamp(max=last)
        written = self.states.all_token_ids.gpu[rows[:, None], columns]
        return splice(drafts, packed, written, self.states.total_len.gpu[rows])


def pack_lookups(request_ids: list[str], lookups: Mapping[str, Lookup]) -> np.ndarray:
    """One row per request: tokens known, length of the continuation, the continuation, padded; (B, 2 + longest)."""
    longest = max(len(lookup.continuation) for lookup in lookups.values())
    packed = np.zeros((len(request_ids), 2 + longest), dtype=np.int64)
    for row, request_id in zip(packed, request_ids, strict=True):
        lookup = lookups.get(request_id)
        if lookup is not None:
            row[0], row[1] = lookup.num_known, len(lookup.continuation)
            row[2 : 2 + len(lookup.continuation)] = lookup.continuation
    return packed


def splice(drafts: Tensor, packed: Tensor, written: Tensor, total: Tensor) -> Tensor:
    """Replace drafts by continuations that turned out right so far; no step waits for the device.

    Args:
        drafts: What is drafted where no continuation fits, (B, K).
        packed: Rows of `pack_lookups`, (B, 2 + M).
        written: Tokens of each request from where the host stopped knowing, (B, M); only the first `total - known` are
        real.
        total: Tokens each request has by now, (B,).

    Returns:
        (B, K), of the type of `drafts`.
    """
    known, length, continuation = packed[:, 0], packed[:, 1], packed[:, 2:]
    ahead = total.to(known.dtype) - known  # (B,)
    at = torch.arange(continuation.shape[1], device=packed.device)
    agrees = ((continuation == written) | (at >= ahead[:, None])).all(dim=1)
    columns = ahead[:, None] + torch.arange(drafts.shape[1], device=packed.device)  # (B, K)
    fits = agrees[:, None] & (ahead >= 0)[:, None] & (columns < length[:, None])
    taken = continuation.gather(1, columns.clamp(0, continuation.shape[1] - 1))
    return torch.where(fits, taken.to(drafts.dtype), drafts)
