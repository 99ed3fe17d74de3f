"""Speculation in one live engine: what is put into it, and what the engine's own code talks to."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tlt_lightning.engine.base import NamedTensors
from tlt_lightning.engine.vllm import internals
from tlt_lightning.engine.vllm.calibration import Dial, FillerTexts
from tlt_lightning.engine.vllm.drafter_weights import update_head
from tlt_lightning.engine.vllm.graphs import PlannedGraphs
from tlt_lightning.engine.vllm.runner_v1 import V1Drafter, sample_plainly_without_drafts, step_plainly_without_drafts
from tlt_lightning.engine.vllm.runner_v2 import V2Drafter
from tlt_lightning.engine.vllm.speculation import Speculation
from tlt_lightning.engine.vllm.steering import DeviceSteering, HostSteering
from tlt_lightning.host_copy import HostCopy
from tlt_lightning.speculation.alarm import AcceptanceAlarm
from tlt_lightning.speculation.controller import SpeculationControl
from tlt_lightning.speculation.eagle3_files import HeadShape
from tlt_lightning.speculation.lookup import RunningTexts
from tlt_lightning.speculation.strategy import Strategy
from tlt_lightning.speculation.trace import StepTrace

if TYPE_CHECKING:
    from vllm.v1.engine.llm_engine import LLMEngine

log = logging.getLogger(__name__)


class SpeculationSession:
    """Steers a live engine by a `Speculation`; outlives no engine.

    Args:
        speculation: The user's choices, checked.
        engine: An engine started with `speculation`'s arguments.
        head: Shape of the learned drafter's head, if there is one.
        graphs: The graphs it captured by plan; None if it has none.
    """

    def __init__(
        self, speculation: Speculation, engine: LLMEngine, head: HeadShape | None, graphs: PlannedGraphs | None
    ) -> None:
        is_v2 = internals.runs_v2()
        internals.check_runner(engine, is_v2=is_v2)
        self.engine = engine
        self.head = head
        self.graphs = graphs
        self._kept_head, self._head_is_kept = HostCopy(), False
        self.trace = None if speculation.trace is None else StepTrace(speculation.trace)
        self.control = SpeculationControl(
            speculation.selector,
            steps_per_choice=speculation.steps_per_choice,
            trace=self.trace,
            is_cold=speculation.cold_head,
        )
        self.texts = None
        if speculation.siblings or speculation.ngram:
            self.texts = RunningTexts(
                siblings=speculation.siblings, ngram=speculation.ngram, keeps=speculation.keep_siblings == "run"
            )
        runner = internals.model_runner_of(engine)
        self.steering: HostSteering | DeviceSteering = (
            self._steer_v2(runner, speculation) if is_v2 else self._steer_v1(runner, speculation)
        )
        if graphs is not None and graphs.plan is not None:
            graphs.attach(runner)
            log.info("CUDA graphs by plan:\n%s", graphs.plan.table(graphs.report()))
        scheduler: Any = internals.scheduler_of(engine)
        scheduler.steering = self.steering
        self._scheduler = scheduler

    def _steer_v2(self, runner: Any, speculation: Speculation) -> DeviceSteering:
        steering = DeviceSteering(self.control, self.texts)
        steering.drafter = V2Drafter(
            runner,
            has_head=speculation.head is not None,
            defers=speculation.catch_up == "deferred",
            strategy=lambda: steering.strategy,
            look_up=None if self.texts is None else steering.look_up,
        )
        return steering

    def _steer_v1(self, runner: Any, speculation: Speculation) -> HostSteering:
        steering = HostSteering(self.control, self.texts)
        sample_plainly_without_drafts(runner)
        if speculation.head is None:
            step_plainly_without_drafts(runner, lambda: steering.strategy.is_off)
        else:
            steering.drafter = V1Drafter(runner, defers=speculation.catch_up == "deferred")
        return steering

    @contextmanager
    def calibrating(self) -> Iterator[Dial]:
        """Steer by a dial inside the block, and after it go on as if nothing had been written there."""
        graphs, steering = self.graphs, self.steering
        dial = Dial(lambda: 0 if graphs is None else graphs.num_misses())
        control, texts = self.control, self.texts
        never = AcceptanceAlarm(window=sys.maxsize)  # random texts are not what the head was trained on
        self.control = steering.control = SpeculationControl(dial, steps_per_choice=1, alarm=never)
        if texts is not None:
            self.texts = steering.texts = FillerTexts(siblings=True, ngram=True, keeps=False)
        try:
            yield dial
        finally:
            self.control, self.texts = control, texts
            steering.control, steering.texts = control, texts
            self.engine.reset_prefix_cache()
            if steering.drafter is not None:
                steering.drafter.has_holes = False  # whoever had them is gone

    def begin_rollout(self) -> None:
        """Start the counts of a new rollout."""
        self.control.begin_rollout()
        self.steering.num_reprefills = 0
        if self.steering.drafter is not None:
            self.steering.drafter.num_skipped = 0
            if self.steering.drafter.backlog is not None:
                self.steering.drafter.backlog.num_flushes = 0
        if self.graphs is not None:
            self.graphs.hits.clear()

    def add(self, request_id: str) -> None:
        """Learn of a request that vLLM has just been given, by vLLM's own id for it."""
        if self.texts is not None:
            self.texts.add(request_id, internals.reach(self._scheduler.requests[request_id], "all_token_ids"))

    def end_rollout(self) -> None:
        """Forget what belongs to the rollout that is over."""
        if self.texts is not None:
            self.texts.end_rollout()
        if self.steering.drafter is not None and self.steering.drafter.backlog is not None:
            self.steering.drafter.backlog.clear()
        if self.trace is not None:
            self.trace.flush()

    def account(self, seconds: float) -> None:
        """Add the time of a call of the engine."""
        self.control.account(seconds)

    def update_head(self, named_tensors: NamedTensors, version: int) -> None:
        """Replace the learned drafter's trainable weights."""
        if self.head is None or self.steering.drafter is None:
            raise RuntimeError("`update_drafter` has nothing to update: the engine speculates without a `head`.")
        update_head(self.engine, self.steering.drafter.model, self.head.tensors, named_tensors)
        self._head_is_kept = False
        if not self.engine.has_unfinished_requests():
            self.engine.reset_prefix_cache()  # of keys and values that the old head computed for prompts
        self.control.weights_changed(version)

    def keep_head(self) -> None:
        """Copy the learned drafter's own weights to the host; to be called before the engine sleeps, which drops them.

        vLLM could keep them itself (`sleep_preserve_parameter_names`), in pageable memory, at a tenth of the speed.
        """
        if self.head is not None and not self._head_is_kept:
            self._kept_head.fill(self._head_parameters())
            self._head_is_kept = True

    @torch.no_grad()
    def restore_head(self) -> None:
        """Put back what `keep_head` kept; to be called when the engine is awake again."""
        if self._head_is_kept:
            kept = self._kept_head.tensors
            for name, parameter in self._head_parameters():
                parameter.copy_(kept[name], non_blocking=True)

    def _head_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Those that are not the policy's, which brings its own."""
        policy: nn.Module = internals.reach(internals.model_runner_of(self.engine), "get_model")()
        shared = {id(parameter) for parameter in policy.parameters()}
        head: nn.Module = internals.reach(self.steering, "drafter.model")
        return ((name, parameter) for name, parameter in head.named_parameters() if id(parameter) not in shared)

    def policy_changed(self) -> None:
        """The policy's weights have changed: old answers are worth less, and a drafter that failed is retried."""
        self.control.weights_changed()
        if self.texts is not None and not self.texts.keeps:
            self.texts.clear()

    @property
    def strategy(self) -> Strategy:
        """The strategy in force."""
        return self.control.strategy

    @property
    def acceptance_length(self) -> float:
        """Mean tokens per request and speculative step of this rollout."""
        return self.control.counters.acceptance_length

    def stats(self) -> dict[str, float]:
        """Metrics of the rollout."""
        stats = self.control.stats()
        if self.head is not None and self.steering.drafter is not None:
            stats["speculation/skipped_passes"] = float(self.steering.drafter.num_skipped)
            backlog = self.steering.drafter.backlog
            catch_ups = self.steering.num_reprefills if backlog is None else backlog.num_flushes
            stats["speculation/catch_ups"] = float(catch_ups)
        if self.graphs is not None:
            stats["speculation/graph_hits"] = self.graphs.hit_share()
        return stats

    def close(self) -> None:
        """Close the trace."""
        if self.trace is not None:
            self.trace.close()
