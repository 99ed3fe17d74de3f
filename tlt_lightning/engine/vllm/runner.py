"""Connect vLLM's scheduler and model runner with the strategy controller."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter
from typing import Any

from torch import Tensor

from tlt_lightning.engine.vllm import internals
from tlt_lightning.engine.vllm.drafter_weights import HeadWeights
from tlt_lightning.engine.vllm.graphs import PlannedGraphs
from tlt_lightning.engine.vllm.internals import reach
from tlt_lightning.engine.vllm.kv_catch_up import KVCatchUp
from tlt_lightning.replacing import replaced
from tlt_lightning.rollout import Request, VerifiedDraft
from tlt_lightning.speculation.alarm import AcceptanceAlarm
from tlt_lightning.speculation.calibration import (
    CalibrationSelector,
    Decode,
    FillerDrafter,
    batch_sizes,
    follow_measuring,
    lead_measuring,
    measure_steps,
)
from tlt_lightning.speculation.controller import StepPlan, StepResult, StrategyController
from tlt_lightning.speculation.lookup import LEARNED, LookupDraft, Source
from tlt_lightning.speculation.strategy import Strategy

_num_tokens, _num_stale_tokens = attrgetter("num_tokens"), attrgetter("num_stale_output_tokens")


@dataclass(frozen=True, slots=True)
class _StepRecord:
    """Records a scheduled step, which may finish only after the next one is planned."""

    plan: StepPlan
    lookups: Mapping[str, LookupDraft]


class EngineParts:
    """Lists a live engine's parts, valid until `close`; changes are at one's own risk.

    They are vLLM's own `scheduler` and `model_runner`, and ours: the `controller` that chooses strategies and `graphs`
    by plan, both None without speculation, the latter also where none are planned.

    Args:
        engine: vLLM's engine.
        speculative_runner: Carries the strategies out in the model runner; None without speculation.
    """

    def __init__(self, engine: Any, speculative_runner: SpeculativeRunner | None) -> None:
        self.engine, self.speculative_runner = engine, speculative_runner
        self.scheduler, self.model_runner = internals.live_scheduler(engine), internals.live_model_runner(engine)
        self.controller = None if speculative_runner is None else speculative_runner.controller
        self.graphs = None if speculative_runner is None else speculative_runner.graphs


class SpeculativeRunner(ABC):
    """Carries out the controller's strategies in vLLM's scheduler, model runner and drafter.

    Calls of a step in order: `before_schedule`, `after_schedule`, `propose` of the subclass, `after_step`, and `drafts`
    where drafts visit the host.

    Args:
        runner: vLLM's model runner.
        controller: Chooses the strategies and learns from the steps.
        head: The head's module in it; None without one.
        graphs: The CUDA graphs captured by plan; None without.
    """

    def __init__(
        self, runner: Any, controller: StrategyController, *, head: Any = None, graphs: PlannedGraphs | None = None
    ) -> None:
        self.runner, self.controller, self.head, self.graphs = runner, controller, head, graphs
        self.weights: HeadWeights | None = None
        self.catch_up = None if head is None else KVCatchUp(head, reach(runner, "max_num_reqs"))
        self.num_skipped = 0
        self.verified: dict[str, list[VerifiedDraft]] = {}  # by vLLM's name of a request
        self.verified_for: dict[str, list[VerifiedDraft]] = {}  # the same lists by the caller's
        self._plan: StepPlan | None = None
        self._lookups: dict[str, LookupDraft] = {}  # verified in the step that is scheduled next

    @property
    def wants_calibration(self) -> bool:
        """True while measured steps would help the selector."""
        return self.controller.engine_ranks.decide(lambda: self.controller.selector.wants_calibration)

    def calibrate(self, decode: Decode, num_requests: int, max_num_seqs: int) -> None:
        """Measure steps of `decode`, first of `num_requests`, up to `max_num_seqs`; leave only keys and values."""
        learner, engine_ranks, graphs = self.controller.selector, self.controller.engine_ranks, self.graphs
        selector, steps = CalibrationSelector(lambda: 0 if graphs is None else graphs.num_misses()), []
        controller = StrategyController(
            selector,
            steps_per_choice=1,
            lookups=FillerDrafter(siblings=True, ngram=True),
            alarm=AcceptanceAlarm(window=sys.maxsize),  # random texts are not what the head was trained on
            engine_ranks=engine_ranks,
        )
        with replaced(self, "controller", controller):  # whose counts, alarm and look-ups are its own
            if engine_ranks.is_first:
                sizes = batch_sizes(num_requests, max_num_seqs)
                steps = measure_steps(selector, lead_measuring(decode, engine_ranks), learner.arms, sizes)
                engine_ranks.decide(lambda: 0)
            else:
                follow_measuring(decode, engine_ranks)
        if steps := engine_ranks.decide(lambda: steps):
            learner.calibrate(steps)

    def begin_rollout(self) -> None:
        """Start the counts of a new rollout."""
        self.controller.begin_rollout()
        self.num_skipped = 0
        if self.catch_up is not None:
            self.catch_up.num_flushes = 0
        if self.graphs is not None:
            self.graphs.hits.clear()

    def add(self, request: Request, request_id: str, tokens: Sequence[int]) -> None:
        """Begin the response to a request of this name; `tokens` grows while it is written."""
        if (lookups := self.controller.lookups) is not None:
            lookups.add(request_id, tokens, len(request.prompt_ids))
        self.verified[request_id] = self.verified_for[str(request.id)] = []

    def end_rollout(self) -> None:
        """Forget the rollout that is over."""
        self.controller.end_rollout()
        self.verified.clear()
        self.verified_for.clear()
        if self.catch_up is not None:
            self.catch_up.clear()

    def before_schedule(self, scheduler: Any) -> int:
        """Plan a step; return the draft length to ask of vLLM's own drafter."""
        running = scheduler.running
        admitted = num_admissible(scheduler)
        context = sum(map(_num_tokens, running)) / len(running) if running else 0.0
        self._plan = self.controller.plan(len(running) + admitted, context, len(scheduler.waiting) - admitted)
        return self.num_engine_drafts

    @property
    @abstractmethod
    def num_engine_drafts(self) -> int:
        """Tokens that vLLM's own drafter is asked for."""

    def after_schedule(self, output: Any) -> None:
        """Attach the plan to the scheduled step, with the requests that really run."""
        assert self._plan is not None
        output.speculation = _StepRecord(self._plan.with_batch(len(output.num_scheduled_tokens)), self._lookups)
        self._lookups = {}
        if self.catch_up is not None and output.preempted_req_ids:
            self.catch_up.drop(output.preempted_req_ids)  # whoever comes back reads everything anew
        for request_id in output.finished_req_ids:
            self.verified.pop(request_id, None)
            if self.controller.lookups is not None:
                self.controller.lookups.remove(request_id)

    def drafts(self, scheduler: Any, request_ids: list[str], drafts: list[list[int]]) -> list[list[int]]:
        """Return the drafts to verify in the next step, given what vLLM's own drafter proposed."""
        return [draft[: self.controller.strategy.num_draft_tokens] for draft in drafts]

    def after_step(self, scheduler: Any, output: Any, result: Any) -> None:
        """Collect what each request drafted and emitted in a step."""
        if scheduler.requests.keys().isdisjoint(output.num_scheduled_tokens):
            return  # nothing was scheduled, or all whom it was scheduled for have left
        record: _StepRecord = output.speculation
        drafted, emitted, sources, is_decode = [], [], [], True
        if _is_plain_decode(scheduler, output, result):
            emitted = [1] * len(output.num_scheduled_tokens)
            drafted = [0] * len(emitted)
        else:
            for request_id, num_scheduled in output.num_scheduled_tokens.items():
                index, request = result.req_id_to_index.get(request_id), scheduler.requests.get(request_id)
                tokens = result.sampled_token_ids[index] if result.sampled_token_ids and index is not None else ()
                num_drafts = len(output.scheduled_spec_decode_tokens.get(request_id, ()))
                is_dropped = request is None or (request.num_stale_output_tokens > 0 and request.drop_stale_output)
                if not tokens or is_dropped or num_scheduled > 1 + num_drafts:
                    is_decode = False  # a prompt, a part of one, or a response nobody waits for
                    continue
                drafted.append(num_drafts)
                emitted.append(len(tokens))
                lookup = record.lookups.get(request_id)
                source = self.source(record.plan.verifies, lookup, request) if num_drafts else None
                sources.append(source)
                if source is not None:
                    draft = (request.num_output_tokens, source[0], num_drafts, len(tokens) - 1)
                    self.verified[request_id].append(draft)
        self.controller.finished(StepResult(record.plan, drafted, emitted, sources, is_decode))

    def source(self, strategy: Strategy, lookup: LookupDraft | None, request: Any) -> Source | None:
        """Return the source of a request's drafts; None for fillers."""
        if lookup is not None:
            return lookup.source
        return LEARNED if strategy.is_learned else None

    def _skip(self, request_ids: list[str], **inputs: Any) -> None:
        """Keep the inputs of the head, by `KVCatchUp.add`, of a step in which every request decoded one token."""
        assert self.catch_up is not None
        self.num_skipped += 1
        if not self.catch_up.has_room(len(request_ids)):
            self._catch_up()
        self.catch_up.add(request_ids, **inputs)

    def _catch_up(self) -> None:
        """Give the head the keys and values that it has skipped."""
        if self.catch_up is not None and len(self.catch_up):
            row_of, block_table, block_size = self._cache()
            self.catch_up.flush(row_of=row_of, block_table=block_table, block_size=block_size)

    @abstractmethod
    def _cache(self) -> tuple[Mapping[str, int], Tensor, int]:
        """Return row of each request, the head's block table (rows, blocks), tokens per block."""

    def stats(self) -> dict[str, float]:
        """Return metrics of the rollout."""
        stats = self.controller.stats()
        if self.catch_up is not None:
            stats["speculation/skipped_passes"] = float(self.num_skipped)
            stats["speculation/catch_ups"] = float(self.catch_up.num_flushes)
        if self.graphs is not None:
            stats["speculation/graph_hits"] = self.graphs.hit_share()
        return stats


def num_admissible(scheduler: Any) -> int:
    """Return the number of waiting requests that the next step has a seat and cache for.

    A strategy is chosen for the batch that will run, and vLLM admits requests only afterwards, so its rule is foretold:
    in their order, as long as each finds ceil(tokens / block size) free blocks in every group of the cache.
    """
    seats = scheduler.max_num_running_reqs - len(scheduler.running)
    if seats <= 0 or not scheduler.waiting:
        return 0
    manager, admitted = scheduler.kv_cache_manager, 0
    groups = len(manager.kv_cache_config.kv_cache_groups)
    # What is running takes a block at most each first; prompts in the prefix cache need less, and pass for whole ones.
    free = manager.block_pool.get_num_free_blocks() - groups * len(scheduler.running)
    for request in islice(scheduler.waiting, seats):
        free -= groups * -(-request.num_tokens // scheduler.block_size)
        if free < 0:
            break
        admitted += 1
    return admitted


def _is_plain_decode(scheduler: Any, output: Any, result: Any) -> bool:
    """Return True if every request emitted one token that is wanted; use no Python loop."""
    scheduled, requests = output.num_scheduled_tokens, scheduler.requests
    return (
        not output.scheduled_spec_decode_tokens
        and output.total_num_scheduled_tokens == len(scheduled) == len(result.sampled_token_ids)
        and all(result.sampled_token_ids)
        and scheduled.keys() <= requests.keys()
        and not any(map(_num_stale_tokens, map(requests.__getitem__, scheduled)))
    )
