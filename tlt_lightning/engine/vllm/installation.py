"""Ask vLLM for speculation, and steer its drafts in a live engine."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from tlt_lightning.engine.vllm import internals
from tlt_lightning.engine.vllm.drafter_weights import HeadWeights
from tlt_lightning.engine.vllm.graphs import PlannedGraphs
from tlt_lightning.engine.vllm.patches.coupled_drafts import COUPLED
from tlt_lightning.engine.vllm.speculation import Speculation
from tlt_lightning.ranks.engine_ranks import ALONE, EngineRanks
from tlt_lightning.speculation.controller import StrategyController
from tlt_lightning.speculation.eagle3_files import HeadShape
from tlt_lightning.speculation.lookup import LookupDrafter
from tlt_lightning.speculation.trace import StepTrace

if TYPE_CHECKING:
    from vllm.v1.engine.llm_engine import LLMEngine

    from tlt_lightning.engine.vllm.runner import SpeculativeRunner

log = logging.getLogger(__name__)


def speculation_args(speculation: Speculation, *, is_v2: bool) -> dict[str, Any]:
    """Return vLLM's engine arguments, for the V2 model runner if `is_v2`."""
    from tlt_lightning.engine.vllm.scheduler import SteeredAsyncScheduler, SteeredScheduler

    config: dict[str, Any] = {
        "num_speculative_tokens": speculation.max_draft_tokens,
        "rejection_sample_method": "standard",
    }
    is_coupled = speculation.couples_drafts(is_v2=is_v2)
    if speculation.head is not None:
        sampling = "greedy" if is_coupled else speculation.draft_sampling
        config |= {"method": "eagle3", "model": speculation.head, "draft_sample_method": sampling}
    elif is_v2:
        config |= {"method": "ngram_gpu"}  # stands in: it is asked for nothing
    else:
        config |= {"method": "custom_class", "model": "tlt_lightning.engine.vllm.runner_v1.NoDrafter"}
    # V1 needs each step's tokens on the host before it looks up, and vLLM's CPU build is never asynchronous.
    is_async = is_v2 or not (speculation.siblings or speculation.ngram or internals.is_cpu_build())
    return {
        "speculative_config": config,
        "scheduler_cls": SteeredAsyncScheduler if is_async else SteeredScheduler,
        "async_scheduling": is_async,
        **({"additional_config": COUPLED} if is_coupled else {}),
    }


def install(
    speculation: Speculation,
    engine: LLMEngine,
    *,
    compute_dtype: str,
    head: HeadShape | None,
    graphs: PlannedGraphs | None,
    engine_ranks: EngineRanks = ALONE,
) -> SpeculativeRunner:
    """Speculate in a live engine for as long as it lives.

    Args:
        speculation: How.
        engine: Started with `speculation_args`.
        compute_dtype: Type it computes in.
        head: The head's shape, from `Speculation.check`.
        graphs: The graphs it captured by plan; None if it has none.
        engine_ranks: The ranks that are the engine.
    """
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    from tlt_lightning.engine.vllm.runner_v1 import RunnerV1
    from tlt_lightning.engine.vllm.runner_v2 import RunnerV2

    is_v2 = internals.runs_v2()
    internals.check_runner(engine, is_v2=is_v2)
    looks_up = speculation.siblings or speculation.ngram
    controller = StrategyController(
        speculation.selector,
        steps_per_choice=speculation.steps_per_choice,
        lookups=LookupDrafter(siblings=speculation.siblings, ngram=speculation.ngram) if looks_up else None,
        trace=None if speculation.trace is None or not engine_ranks.is_first else StepTrace(speculation.trace),
        is_cold=speculation.cold_head,
        engine_ranks=engine_ranks,
        compute_dtype=compute_dtype,
    )
    model_runner, has_head = internals.live_model_runner(engine), head is not None
    runner: SpeculativeRunner = (
        RunnerV2(model_runner, controller, has_head=has_head, graphs=graphs)
        if is_v2
        else RunnerV1(model_runner, controller, has_head=has_head)
    )
    if head is not None:
        runner.weights = HeadWeights(engine, runner.head, head.tensors, engine_ranks)
    if graphs is not None and graphs.plan is not None:
        graphs.attach(model_runner)
        log.info("CUDA graphs by plan:\n%s", graphs.plan.table(graphs.report()))
    scheduler: Any = internals.live_scheduler(engine)
    assert isinstance(scheduler, AsyncScheduler) == engine.vllm_config.scheduler_config.async_scheduling
    scheduler.speculative_runner = runner
    return runner
