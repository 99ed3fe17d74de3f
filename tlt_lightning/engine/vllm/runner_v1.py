"""The drafter of vLLM's V1 model runner, which the CPU build uses: skips passes, takes foreign drafts."""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any

import torch
from torch import Tensor

from tlt_lightning.engine.vllm.internals import reach
from tlt_lightning.engine.vllm.kv_catch_up import DrafterBacklog


class NoDrafter:
    """Stands in where vLLM wants a drafter and all drafts come from the scheduler's side.

    vLLM builds it from `speculative_config` with method `custom_class`.
    """

    def __init__(self, vllm_config: Any) -> None:
        pass

    def load_model(self, target_model: Any) -> None:
        """Nothing to load."""

    def propose(
        self, sampled_token_ids: list[list[int]], num_tokens: Any, token_ids: Any, slot_mappings: Any = None
    ) -> list[list[int]]:
        """Propose nothing."""
        return [[] for _ in sampled_token_ids]


def sample_plainly_without_drafts(runner: Any) -> None:
    """Let a V1 model runner sample as the plain engine does in steps that verify nothing.

    It runs its verification over no drafts at all, which costs time and fails under top-k.
    """
    sample = reach(runner, "_sample")

    def sampled(logits: Tensor, metadata: Any) -> Any:
        return sample(logits, None if metadata is not None and metadata.max_spec_len == 0 else metadata)

    runner._sample = sampled


def step_plainly_without_drafts(runner: Any, is_off: Callable[[], bool]) -> None:
    """Let a V1 model runner take steps that neither verify nor draft as the plain engine does.

    Otherwise it prepares a verification of nothing and asks for no drafts, which takes some 5% of a small policy's step
    on a CPU. Only for a runner whose drafter is `NoDrafter`: a head must see every step.

    Args:
        runner: The model runner.
        is_off: Tells whether the step being executed drafts nothing.
    """
    config = reach(runner, "speculative_config")
    execute, sample = reach(runner, "execute_model"), reach(runner, "sample_tokens")

    def executed(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        if is_off() and scheduler_output.num_scheduled_tokens and not scheduler_output.scheduled_spec_decode_tokens:
            runner.speculative_config = None
        return execute(scheduler_output, *args, **kwargs)

    def sampled(*args: Any, **kwargs: Any) -> Any:
        try:
            return sample(*args, **kwargs)
        finally:
            runner.speculative_config = config

    runner.execute_model, runner.sample_tokens = executed, sampled


class V1Drafter:
    """Steers the learned drafter of a V1 model runner.

    Args:
        runner: The model runner.
        defers: Keep what a skipped drafter misses and catch up later; without it the requests must be read again.
    """

    def __init__(self, runner: Any, *, defers: bool) -> None:
        self.runner = runner
        self.drafter = reach(runner, "drafter")
        self.backlog = DrafterBacklog(self.model, reach(runner, "max_num_reqs")) if defers else None
        self.num_skipped = 0
        self.has_holes = False
        reach(self.drafter, "_last_draft_probs")
        self._propose = reach(self.drafter, "propose")
        self.drafter.propose = self.propose
        self._draft_probs = reach(runner, "_get_spec_decode_draft_probs")
        runner._get_spec_decode_draft_probs = self.draft_probs
        self._foreign: Container[str] = ()

    @property
    def model(self) -> Any:
        """The drafter's module."""
        model = reach(self.drafter, "model")
        return model.unwrap() if hasattr(model, "unwrap") else model

    def propose(self, **inputs: Any) -> Tensor:
        """Run vLLM's drafter, or skip it in a step that drafts nothing."""
        metadata = inputs["common_attn_metadata"]
        if inputs["num_speculative_tokens"] == 0 and (self.backlog is None or metadata.max_query_len == 1):
            self.num_skipped += 1
            self.drafter._last_draft_probs = None  # the runner takes what is there for this step's
            self._miss(inputs)
            batch_size = inputs["next_token_ids"].shape[0]
            return torch.empty(batch_size, 0, dtype=torch.int64, device=inputs["next_token_ids"].device)
        self._catch_up(metadata)
        return self._propose(**inputs)

    def _miss(self, inputs: dict[str, Any]) -> None:
        if self.backlog is None:
            self.has_holes = True
            return
        next_ids = inputs["next_token_ids"]
        rows = next_ids.shape[0]
        if not self.backlog.has_room(rows):
            self._catch_up(inputs["common_attn_metadata"])
        self.backlog.add(
            self.runner.input_batch.req_ids[:rows],
            [inputs["target_hidden_states"][:rows]],
            next_ids,
            inputs["target_positions"][:rows],
        )

    def _catch_up(self, metadata: Any) -> None:
        if self.backlog is None or not len(self.backlog):
            return
        table, block_size = metadata.block_table_tensor, self.drafter.block_size

        def slots_of(rows: Tensor, positions: Tensor) -> Tensor:
            return table[rows, positions // block_size].long() * block_size + positions % block_size

        self.backlog.flush(self.runner.input_batch.req_id_to_index, slots_of)

    def replace(self, request_ids: Container[str]) -> None:
        """Tell the verification which requests verify drafts that the learned drafter did not sample."""
        self._foreign = request_ids

    def draft_probs(self, metadata: Any) -> Tensor | None:
        """Probabilities of the drafts, (N, V): one-hot rows where the drafts are not the learned drafter's."""
        probs = self._draft_probs(metadata)
        if probs is None or not self._foreign:
            return probs
        start = 0
        for request_id, count in zip(self.runner.input_batch.req_ids, metadata.num_draft_tokens, strict=False):
            if count and request_id in self._foreign:
                rows = probs[start : start + count]
                rows.zero_()
                rows.scatter_(1, metadata.draft_token_ids[start : start + count].long()[:, None], 1.0)
            start += count
        return probs
