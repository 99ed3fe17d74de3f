"""Speculate on vLLM's V1 model runner, which the CPU build uses."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from tlt_lightning.engine.vllm.internals import reach
from tlt_lightning.engine.vllm.runner import SpeculativeRunner
from tlt_lightning.speculation.controller import StrategyController
from tlt_lightning.speculation.lookup import LookupDraft


class NoDrafter:
    """Stands in for vLLM's drafter (method `custom_class`) where the scheduler's side drafts."""

    def __init__(self, vllm_config: Any) -> None:
        pass

    def load_model(self, target_model: Any) -> None:
        """Load nothing."""

    def propose(
        self, sampled_token_ids: list[list[int]], num_tokens: Any, token_ids: Any, slot_mappings: Any = None
    ) -> list[list[int]]:
        """Propose nothing."""
        return [[] for _ in sampled_token_ids]


def sample_plainly_without_drafts(runner: Any) -> None:
    """Sample plainly where nothing is verified: verification costs time and fails under top-k."""
    sample = reach(runner, "_sample")

    def sampled(logits: Tensor, metadata: Any) -> Any:
        return sample(logits, None if metadata is not None and metadata.max_spec_len == 0 else metadata)

    runner._sample = sampled


def step_plainly_without_drafts(runner: Any, is_off: Callable[[], bool]) -> None:
    """Let a V1 model runner step plainly where it neither verifies nor drafts.

    Saves some 5% of a small policy's step on a CPU. Only for the drafter `NoDrafter`: a head must see every step.

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


class RunnerV1(SpeculativeRunner):
    """Speculates on a V1 model runner: the host knows all tokens between steps and looks up.

    Args:
        runner: vLLM's model runner.
        controller: Chooses the strategies.
        has_head: True if its drafter is a head; `NoDrafter` otherwise.
    """

    def __init__(self, runner: Any, controller: StrategyController, *, has_head: bool) -> None:
        self.drafter = reach(runner, "drafter")
        head: Any = reach(self.drafter, "model") if has_head else None
        super().__init__(runner, controller, head=head.unwrap() if hasattr(head, "unwrap") else head)
        self._foreign: Mapping[str, LookupDraft] = {}  # looked up, in the step that is verified next
        sample_plainly_without_drafts(runner)
        if not has_head:
            step_plainly_without_drafts(runner, lambda: self.controller.strategy.is_off)
            return
        reach(self.drafter, "_last_draft_probs")
        self._propose, self.drafter.propose = reach(self.drafter, "propose"), self.propose
        self._draft_probs = reach(runner, "_get_spec_decode_draft_probs")
        runner._get_spec_decode_draft_probs = self.draft_probs
        self._block_table: Any = None

    @property
    @override
    def num_engine_drafts(self) -> int:
        strategy = self.controller.strategy
        return strategy.num_draft_tokens if strategy.is_learned and self.head is not None else 0

    @override
    def drafts(self, scheduler: Any, request_ids: list[str], drafts: list[list[int]]) -> list[list[int]]:
        drafts = super().drafts(scheduler, request_ids, drafts)
        requests = ((name, scheduler.requests.get(name)) for name in request_ids)
        writing = [name for name, request in requests if request is not None and not request.is_prefill_chunk]
        self._lookups = self.controller.look_up(writing, self.controller.strategy.num_draft_tokens)
        for place, name in enumerate(request_ids):
            if name in self._lookups:
                drafts[place] = self._lookups[name].tokens
        self._foreign = self._lookups
        return drafts

    def propose(self, **inputs: Any) -> Tensor:
        """Run vLLM's drafter, or skip a step that drafts nothing."""
        metadata, next_ids = inputs["common_attn_metadata"], inputs["next_token_ids"]
        self._block_table = metadata.block_table_tensor
        if inputs["num_speculative_tokens"] or metadata.max_query_len > 1:
            self._catch_up()
            return self._propose(**inputs)
        self.drafter._last_draft_probs = None  # the runner takes what is there for this step's
        rows = next_ids.shape[0]
        hidden, positions = inputs["target_hidden_states"][:rows], inputs["target_positions"][:rows]
        self._skip(self.runner.input_batch.req_ids[:rows], hidden=[hidden], last_ids=next_ids, positions=positions)
        return torch.empty(rows, 0, dtype=torch.int64, device=next_ids.device)

    @override
    def _cache(self) -> tuple[Mapping[str, int], Tensor, int]:
        return self.runner.input_batch.req_id_to_index, self._block_table, self.drafter.block_size

    def draft_probs(self, metadata: Any) -> Tensor | None:
        """Return the drafts' probabilities, (N, V); drafts not the head's get one-hot rows."""
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
