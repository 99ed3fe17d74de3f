"""Numbers at the ends of what is allowed, and those just beyond them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from threading import TIMEOUT_MAX
from typing import Any

import pytest

from tlt_lightning import (
    BEGMABSelector,
    CostModelSelector,
    DrafterModule,
    DynamicSampling,
    LongTailIdleCallback,
    LoRA,
    PartialRollout,
    PromptSource,
    RLModule,
    Sampling,
    TailBatching,
    TransformersEngine,
    VLLMEngine,
    objectives,
)
from tlt_lightning.callbacks.completions_writer import CompletionsWriter
from tlt_lightning.callbacks.iteration_checkpoint import IterationCheckpoint
from tlt_lightning.callbacks.run_report import RunReport
from tlt_lightning.drafter.packing import check_num_tokens
from tlt_lightning.drafter.teaching import Teaching
from tlt_lightning.engine.vllm.quantization import Quantization
from tlt_lightning.engine.vllm.speculation import Speculation
from tlt_lightning.long_tail.budget import AdaptiveBudget, FixedBudget
from tlt_lightning.long_tail.buffer import DrafterBuffer
from tlt_lightning.rewards import PythonTests, RewardModel, RewardPool, RewardTerm, exact_match
from tlt_lightning.speculation import FixedSelector, Strategy, ThresholdSelector
from tlt_lightning.speculation.selectors.acceptance import AcceptanceEstimator
from tlt_lightning.speculation.strategy import make_arms
from tlt_lightning.training.critic import CriticConfig

TINY = 1e-9
OVERLONG = objectives.OverlongPunishment(max_tokens=9, buffer_tokens=1)


def pool(**arguments: float) -> None:
    RewardPool([RewardTerm(function=exact_match)], **arguments).close()  # type: ignore[arg-type]


def arms(num_draft_tokens: int) -> None:
    make_arms((num_draft_tokens,), ("learned",))


def speculation(**arguments: Any) -> Speculation:
    return Speculation(selector=FixedSelector(num_draft_tokens=1), ngram=True, **arguments)


BOUNDS: list[tuple[Callable[..., Any], str, Sequence[Any], Sequence[Any]]] = [
    (check_num_tokens, "num_tokens", [128, 256], [0, 127, 129, -128]),
    (Teaching, "num_steps", [None, 1], [0]),
    (Teaching, "decay", [TINY, 1], [0, 1 + TINY]),
    (DynamicSampling, "max_rounds", [2], [1]),
    (LoRA, "alpha", [1], [0, -1]),
    (TailBatching, "extra", [0.01, 1], [0, 1.01]),
    (PartialRollout, "extra", [0.01, 1], [0, 1.01]),
    (PartialRollout, "max_policy_lag", [1], [0]),
    (AdaptiveBudget, "most", [TINY, 2], [0]),
    (AdaptiveBudget, "trial", [TINY, 2], [0, inf]),
    (AdaptiveBudget, "overhead", [0], [-TINY, 1]),
    (AdaptiveBudget, "horizon", [2], [1]),
    (FixedBudget, "share", [0, 2], [-TINY, inf]),
    (FixedBudget, "every_n_iterations", [1], [0]),
    (DrafterBuffer, "max_bytes", [1], [0]),
    (partial(DrafterBuffer, 1), "held_out_share", [0, 1 - TINY], [-TINY, 1]),
    (partial(DrafterBuffer, 1), "previous_share", [0, 1 - TINY], [-TINY, 1]),
    (partial(IterationCheckpoint, "folder"), "every_minutes", [0], [-TINY]),
    (partial(IterationCheckpoint, "folder"), "keep", [1], [0]),
    (PythonTests, "time_limit", [TINY], [0]),
    (PythonTests, "memory_mb", [64], [63]),
    (partial(RewardModel, "some/model"), "max_length", [1], [0]),
    (pool, "num_workers", [1], [0]),
    (pool, "timeout", [TINY], [0, TIMEOUT_MAX]),
    (Sampling, "max_tokens", [1], [0]),
    (Sampling, "temperature", [0, 0.01, 2], [-1, 0.005, 2.5]),
    (Sampling, "top_p", [TINY, 1], [0, 1 + TINY]),
    (Sampling, "top_k", [0, 1], [-1]),
    (Sampling, "min_p", [0, 1], [-TINY, 1 + TINY]),
    (partial(Sampling, max_tokens=4), "min_tokens", [0, 4], [-1, 5]),
    (Sampling, "stop_strings", [("end", "done")], [("",)]),
    (Strategy, "num_draft_tokens", [0], [-1]),
    (arms, "num_draft_tokens", [1], [0]),
    (FixedSelector, "num_draft_tokens", [0], [-1]),
    (ThresholdSelector, "num_draft_tokens", [1], [0]),
    (ThresholdSelector, "max_running", [1], [0]),
    (ThresholdSelector, "band", [0], [-1]),
    (BEGMABSelector, "epsilon", [0], [-TINY, 1]),
    (BEGMABSelector, "window", [1], [0]),
    (BEGMABSelector, "pull_size", [1], [0]),
    (BEGMABSelector, "thresholds", [(1, 2)], [(1, 1), (2, 3)]),
    (BEGMABSelector, "groups", [((3,), (3,))], [((3,), (4,))]),
    (CostModelSelector, "max_batch_tokens", [1], [0]),
    (CostModelSelector, "exploration", [0], [-TINY, 1]),
    (CostModelSelector, "margin", [0], [-TINY, 1]),
    (CostModelSelector, "catch_up_seconds", [0, 2], [-TINY]),
    (AcceptanceEstimator, "longest_draft", [1], [0]),
    (partial(AcceptanceEstimator, 1), "window", [1], [0]),
    (objectives.ClippedRatio, "clip_low", [0, 1], [-TINY, 1 + TINY]),
    (objectives.ClippedRatio, "clip_high", [0, 2], [-TINY]),
    (objectives.ClippedRatio, "dual_clip", [None, 1 + TINY], [1]),
    (objectives.SequenceRatio, "sequence_clip_low", [0, 1], [-TINY, 1 + TINY]),
    (objectives.SequenceRatio, "sequence_clip_high", [0, 2], [-TINY]),
    (objectives.CappedRatio, "max_ratio", [1], [1 - TINY]),
    (objectives.CappedRatio, "min_ratio", [0, 1], [-TINY, 1 + TINY]),
    (objectives.SoftGate, "temperature_positive", [TINY], [0]),
    (objectives.SoftGate, "temperature_negative", [TINY], [0]),
    (objectives.MaskedImportance, "keep_above", [0, 1], [-TINY, 1 + TINY]),
    (objectives.MaskedImportance, "keep_below", [1], [1 - TINY]),
    (objectives.TruncatedImportance, "max_weight", [1], [1 - TINY]),
    (objectives.GAE, "gamma", [0, 1], [-TINY, 1 + TINY]),
    (objectives.GAE, "lam", [0, 1], [-TINY, 1 + TINY]),
    (objectives.WhitenedRewardToGo, "gamma", [0, 1], [-TINY, 1 + TINY]),
    (objectives.SequenceMeanTokenSumNorm, "max_tokens", [1], [0]),
    (objectives.GRPO, "entropy_coef", [0], [-TINY]),
    (objectives.KLPenalty, "coef", [TINY], [0]),
    (objectives.PPO, "entropy_coef", [0], [-TINY]),
    (objectives.PPO, "value_coef", [TINY], [0]),
    (VLLMEngine, "kv_cache_gib", [None, TINY], [0, inf]),
    (objectives.PPO, "value_clip", [None, TINY], [0]),
    (objectives.PPO, "target_kl", [None, TINY], [0]),
    (partial(objectives.OverlongPunishment, max_tokens=9), "buffer_tokens", [1, 9], [0, 10]),
]


@pytest.mark.parametrize(("make", "name", "allowed", "refused"), BOUNDS)
def test_what_is_allowed_ends_where_it_is_said_to(
    make: Callable[..., Any], name: str, allowed: Sequence[Any], refused: Sequence[Any]
) -> None:
    for value in allowed:
        make(**{name: value})
    for value in refused:
        with pytest.raises(ValueError, match=rf"`[^`]*\b{name}`"):
            make(**{name: value})


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: RLModule("policy", objectives.GRPO(), reference=3), "reference"),  # type: ignore[arg-type]
        (lambda: RLModule("policy", objectives.GRPO(), lr_scheduler="cosine"), "lr_scheduler"),  # type: ignore[arg-type]
        (lambda: Sampling(temperature="1"), "sampling.temperature"),  # type: ignore[arg-type]
        (lambda: Sampling(top_k=1.5), "sampling.top_k"),  # type: ignore[arg-type]
        (lambda: Sampling(stop_token_ids=3), "sampling.stop_token_ids"),  # type: ignore[arg-type]
        (lambda: Sampling(stop_strings="done"), "sampling.stop_strings"),  # type: ignore[arg-type]
        (lambda: Sampling(stop_strings=3), "sampling.stop_strings"),  # type: ignore[arg-type]
        (lambda: Quantization(layers_in_16_bit="*"), "quantization.layers_in_16_bit"),
        (lambda: Quantization(layers_in_16_bit=3), "quantization.layers_in_16_bit"),  # type: ignore[arg-type]
        (lambda: Quantization(layers_in_16_bit=[3]), "quantization.layers_in_16_bit"),  # type: ignore[list-item]
        (lambda: RewardTerm(function=exact_match, weight="1"), "weight"),  # type: ignore[arg-type]
        (lambda: RewardTerm(function=exact_match, name=3), "name"),  # type: ignore[arg-type]
        (lambda: PromptSource(path="README.md", chat_template=3), "chat_template"),  # type: ignore[arg-type]
        (lambda: PromptSource(path="README.md", prompt_column=None), "prompt_column"),  # type: ignore[arg-type]
        (lambda: PromptSource(path="README.md", chat_template_kwargs=3), "chat_template_kwargs"),  # type: ignore[arg-type]
        (lambda: IterationCheckpoint("folder", keep=1.5), "keep"),  # type: ignore[arg-type]
        (lambda: IterationCheckpoint(3), "dirpath"),  # type: ignore[arg-type]
        (lambda: CompletionsWriter(3), "dirpath"),  # type: ignore[arg-type]
        (lambda: RunReport(3), "dirpath"),  # type: ignore[arg-type]
        (lambda: RunReport("folder", num_completions=1.5), "num_completions"),  # type: ignore[arg-type]
        (lambda: TailBatching("x"), "schedule.extra"),  # type: ignore[arg-type]
        (lambda: RLModule("policy", objectives.GRPO(), gradient_checkpointing="yes"), "gradient_checkpointing"),  # type: ignore[arg-type]
        (lambda: PromptSource(path="README.md", chat="yes"), "chat"),  # type: ignore[arg-type]
        (lambda: PromptSource(path="README.md", answer_column=3), "answer_column"),  # type: ignore[arg-type]
        (lambda: AdaptiveBudget(most=None), "most"),  # type: ignore[arg-type]
        (lambda: AdaptiveBudget(horizon=2.5), "horizon"),  # type: ignore[arg-type]
        (lambda: FixedBudget(every_n_iterations=1.5), "every_n_iterations"),  # type: ignore[arg-type]
        (lambda: LongTailIdleCallback(DrafterModule.__new__(DrafterModule), buffer_gib=None), "buffer_gib"),  # type: ignore[arg-type]
        (lambda: LongTailIdleCallback(DrafterModule.__new__(DrafterModule), max_passes=None), "max_passes"),  # type: ignore[arg-type]
        (lambda: speculation(head=3), "speculation.head"),
        (lambda: Teaching(num_steps=1.5), "teaching.num_steps"),  # type: ignore[arg-type]
        (lambda: Teaching(decay="a"), "teaching.decay"),  # type: ignore[arg-type]
        (lambda: LoRA(target_modules=3), "lora.target_modules"),  # type: ignore[arg-type]
        (lambda: LoRA(target_modules=[3]), "lora.target_modules"),  # type: ignore[list-item]
        (lambda: LoRA(rank=1.5), "lora.rank"),  # type: ignore[arg-type]
        (lambda: CriticConfig(path=3), "critic.path"),  # type: ignore[arg-type]
        (lambda: CriticConfig(path="policy", lora=3), "critic.lora"),  # type: ignore[arg-type]
        (lambda: CriticConfig(warmup_iterations=1.5), "critic.warmup_iterations"),  # type: ignore[arg-type]
        (lambda: objectives.GRPO(loss_kl="a"), "loss_kl"),  # type: ignore[arg-type]
        (lambda: objectives.GRPO(reward_kl=0.1), "reward_kl"),  # type: ignore[arg-type]
        (lambda: objectives.GRPO(advantage=objectives.GroupNormalized), "advantage"),  # type: ignore[arg-type]
        (lambda: objectives.GRPO(surrogate="a"), "surrogate"),  # type: ignore[arg-type]
        (lambda: objectives.GRPO(aggregation="a"), "aggregation"),  # type: ignore[arg-type]
        (lambda: objectives.GRPO(correction="a"), "correction"),  # type: ignore[arg-type]
        (lambda: objectives.DAPO(overlong=1024), "overlong"),  # type: ignore[arg-type]
        (lambda: objectives.DAPO(advantage="a", overlong=OVERLONG), "advantage"),  # type: ignore[arg-type]
        (lambda: objectives.OverlongPunishment(max_tokens="9", buffer_tokens=1), "overlong.max_tokens"),  # type: ignore[arg-type]
        (lambda: objectives.KLPenalty(estimator="k3"), "estimator"),  # type: ignore[arg-type]
        (lambda: TransformersEngine(batch_size=1.5), "batch_size"),  # type: ignore[arg-type]
        (lambda: VLLMEngine(max_num_seqs=1.5), "max_num_seqs"),  # type: ignore[arg-type]
        (lambda: VLLMEngine(tensor_parallel=1.5), "tensor_parallel"),  # type: ignore[arg-type]
        (lambda: VLLMEngine(gpu_memory_utilization="half"), "gpu_memory_utilization"),  # type: ignore[arg-type]
        (lambda: VLLMEngine(enforce_eager="no"), "enforce_eager"),  # type: ignore[arg-type]
        (lambda: VLLMEngine(sleep="no"), "sleep"),  # type: ignore[arg-type]
        (lambda: PromptSource(path=3), "path"),  # type: ignore[arg-type]
        (lambda: speculation(siblings="no"), "speculation.siblings"),
        (lambda: speculation(steps_per_choice=1.5), "speculation.steps_per_choice"),
        (lambda: speculation(graph_pool=3), "speculation.graph_pool"),
        (lambda: LongTailIdleCallback("my-head"), "drafter"),  # type: ignore[arg-type]
        (lambda: LongTailIdleCallback(DrafterModule.__new__(DrafterModule), dirpath=3), "dirpath"),  # type: ignore[arg-type]
    ],
)
def test_a_value_of_another_type_is_refused_by_name(make: Callable[[], Any], name: str) -> None:
    with pytest.raises(TypeError, match=f"`{name}` must "):
        make()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RLModule("", objectives.GRPO()), "`policy` is empty. Give a folder or hub name."),
        (
            lambda: RLModule("policy", objectives.GRPO(), attn_implementation="flash"),  # type: ignore[arg-type]
            "`attn_implementation` must be one of 'sdpa', 'eager', 'flash_attention_2', got 'flash'.",
        ),
        (lambda: LoRA(base_dtype="int4"), "`lora.base_dtype` must be one of 'float32', 'bfloat16', got 'int4'."),  # type: ignore[arg-type]
        (
            lambda: VLLMEngine(dtype=3),  # type: ignore[arg-type]
            "`dtype` must be one of 'auto', 'float32', 'bfloat16', 'float16', got 3.",
        ),
        (lambda: speculation(draft_sampling="all"), "`speculation.draft_sampling` must be one of 'greedy', "),
        (lambda: Quantization("fp4"), "`quantization.weights` must be one of 'fp8' or None, got 'fp4'."),  # type: ignore[arg-type]
    ],
)
def test_a_value_that_is_none_of_the_allowed_is_refused_at_once(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make()
