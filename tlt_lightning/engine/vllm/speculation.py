"""Set how an engine speculates, ask vLLM for it, and steer its drafts in a live engine.

Nothing here changes what is sampled: drafts are verified exactly, and vLLM's lossy variants cannot be asked for. What
`Sampling` has (temperature, top-p, top-k, stop tokens and strings, limits) holds for drafted tokens too; `check_exact`
refuses what does not. vLLM refuses `logit_bias` per request, custom logits processors when an engine starts.

On the V2 model runner look-ups and greedy heads are verified by the noise of plain decoding (`runner_v2.py`): a seed
gives the text that it gives without speculation, whatever is drafted, up to the rounding of batches of other sizes. So
are sampled drafts beside look-ups: the head draws them with that noise (`patches/coupled_drafts.py`).
Elsewhere vLLM's rejection sampling verifies, and a seed reproduces a rollout if the same strategies are chosen at the
same steps, which selectors that learn from the clock do not promise.
"""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tlt_lightning.arguments import Count, checked
from tlt_lightning.engine.vllm import internals
from tlt_lightning.engine.vllm.drafter_weights import HeadWeights
from tlt_lightning.engine.vllm.graphs import PlannedGraphs
from tlt_lightning.engine.vllm.patches.coupled_drafts import COUPLED
from tlt_lightning.engine.vllm.runner import SpeculativeRunner
from tlt_lightning.engine.vllm.runner_v1 import RunnerV1
from tlt_lightning.engine.vllm.runner_v2 import RunnerV2
from tlt_lightning.ranks.engine_ranks import EngineRanks
from tlt_lightning.rollout import Sampling
from tlt_lightning.speculation.controller import StrategyController
from tlt_lightning.speculation.graph_plan import BucketedGraphPool, GraphPool, arms_by_batch
from tlt_lightning.speculation.head_files import HeadShape, check_head, read_head
from tlt_lightning.speculation.lookup import LookupDrafter
from tlt_lightning.speculation.strategy import Drafter, StrategySelector

if TYPE_CHECKING:
    from vllm.v1.engine.llm_engine import LLMEngine

log = logging.getLogger(__name__)


@checked("speculation.")
@dataclass(frozen=True, kw_only=True)
class Speculation:
    """Speculates with a strategy chosen anew for every engine step; samples stay unchanged.

    Args:
        selector: Chooses, before each step, how many tokens are drafted and by whom.
        head: Directory of an EAGLE-3 head trained for the policy, as `speculators` or vLLM save it, or of a DSpark
            head, on a GPU. It drafts blocks as long as those that it was trained on, of which arms take a part.
        cold_head: The head drafts nothing until training brings it weights (`update_drafter`). `LongTailIdleCallback`
            sets this and `head` where it starts from nothing.
        siblings: Draft what any response to the same prompt has said after the same words, in steps for the drafter
            `sibling`, or for `mixed`, where the head drafts for requests without a good match. Needs no training.
        ngram: Draft from the request's own text: what followed the same words before. Steps for `sibling` and `mixed`
            do so, too, where such drafts are expected to be accepted more often. Needs no training.
        max_draft_tokens: The longest draft a selector may ask for; the engine reserves memory for it.
        draft_sampling: How the head drafts above temperature 0: `greedy` takes its likeliest token; `probabilistic`
            samples, with more acceptance. Without `siblings` and `ngram` that takes `max_num_seqs` *
            `max_draft_tokens` * vocabulary numbers on a GPU, and a seed's text hangs on the drafts there, too.
        steps_per_choice: Steps for which a choice of the selector stands.
        graph_pool: Plans which CUDA graphs are captured, on a GPU with vLLM's V2 runner; None captures the shapes that
            the selector can reach (`BucketedGraphPool`).
    """

    selector: StrategySelector
    head: str | None = None
    cold_head: bool = False
    siblings: bool = False
    ngram: bool = False
    max_draft_tokens: Count = 7
    draft_sampling: Literal["greedy", "probabilistic"] = "greedy"
    steps_per_choice: Count = 2
    graph_pool: GraphPool | None = None

    def __post_init__(self) -> None:
        if isinstance(self.head, Path):
            object.__setattr__(self, "head", str(self.head))

    @property
    def drafters(self) -> tuple[Drafter, ...]:
        """The drafters that are there."""
        has_head = self.head is not None
        is_there: dict[Drafter, bool] = {
            "learned": has_head,
            "mixed": has_head and (self.siblings or self.ngram),
            "ngram": self.ngram,
            "sibling": self.siblings,
        }
        return tuple(drafter for drafter in is_there if is_there[drafter])

    @property
    def pool(self) -> GraphPool:
        """The plan of CUDA graphs."""
        return self.graph_pool or BucketedGraphPool()

    def check(self, policy: str, max_num_seqs: int) -> HeadShape | None:
        """Return the head's shape, if there is one.

        Raises:
            ValueError: The selector asks for drafts that nobody makes, or head and policy do not fit.
        """
        head = None if self.head is None else read_head(self.head)
        if head is not None and head.kind.needs_v2 and not internals.runs_v2():
            raise ValueError(
                f"`speculation.head` {self.head!r} is a {head.kind.name} head, which vLLM runs on a GPU alone, by its "
                "V2 runner. Give an EAGLE-3 head, or train one: recipes/adaptive_drafter.yaml in the place of "
                "block_drafter.yaml."
            )
        longest = min(self.max_draft_tokens, (head and head.most_drafts) or self.max_draft_tokens)
        for size, arms in arms_by_batch(self.selector, max_num_seqs).items():
            for arm in arms:
                is_possible = arm.drafter in self.drafters and arm.num_draft_tokens <= longest
                if not (arm.is_off or is_possible):
                    raise ValueError(
                        f"`speculation.selector` may ask for {arm} in a batch of {size}, but `speculation` has the "
                        f"drafters {list(self.drafters)} and at most {longest} draft tokens: set `head`, "
                        "`siblings`, `ngram` or `max_draft_tokens`, add LongTailIdleCallback, which trains a head, or "
                        "leave the arm out."
                    )
        if head is not None:
            check_head(head, policy)
        return head

    def couples_drafts(self, *, is_v2: bool) -> bool:
        """Return True if the head samples with the noise of verification, as V2 needs where look-ups draft, too."""
        return is_v2 and "mixed" in self.drafters and self.draft_sampling == "probabilistic"


def check_exact(sampling: Sampling) -> None:
    """Raise ValueError for sampling whose drafts are not verified exactly.

    vLLM has no `min_p` in its verification, and its V1 runner forbids ends beyond `min_tokens`: for the token after all
    accepted drafts it counts the tokens from before them.
    """
    if asked := {"min_p", "min_tokens"} & sampling.filters.keys():
        names = " and ".join(f"`sampling.{name}`" for name in sorted(asked))
        raise ValueError(
            f"{names} cannot be combined with `speculation`, which would change what is sampled: leave them 0, or set "
            "`engine.speculation` to null."
        )


def speculation_args(speculation: Speculation, *, is_v2: bool) -> dict[str, Any]:
    """Return vLLM's engine arguments, for the V2 model runner if `is_v2`."""
    from tlt_lightning.engine.vllm.scheduler import SteeredAsyncScheduler, SteeredScheduler

    config: dict[str, Any] = {
        "num_speculative_tokens": speculation.max_draft_tokens,
        "rejection_sample_method": "standard",
    }
    is_coupled = speculation.couples_drafts(is_v2=is_v2)
    if speculation.head is not None:
        head, sampling = read_head(speculation.head), "greedy" if is_coupled else speculation.draft_sampling
        config |= {"method": head.kind.method, "model": head.path, "draft_sample_method": sampling}
        config["num_speculative_tokens"] = head.most_drafts or speculation.max_draft_tokens
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
    engine: "LLMEngine",
    compute_dtype: str,
    head: HeadShape | None,
    graphs: PlannedGraphs | None,
    engine_ranks: EngineRanks,
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

    is_v2 = internals.runs_v2()
    internals.check_runner(engine, is_v2=is_v2)
    looks_up = speculation.siblings or speculation.ngram
    controller = StrategyController(
        speculation.selector,
        steps_per_choice=speculation.steps_per_choice,
        lookups=LookupDrafter(siblings=speculation.siblings, ngram=speculation.ngram) if looks_up else None,
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
        log.info("CUDA graphs by plan:\n%s", graphs.plan.table(graphs.mib, graphs.seconds))
    scheduler: Any = internals.live_scheduler(engine)
    assert isinstance(scheduler, AsyncScheduler) == engine.vllm_config.scheduler_config.async_scheduling
    scheduler.speculative_runner = runner
    return runner
