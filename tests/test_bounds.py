"""Numbers at the ends of what is allowed, and those just beyond them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from threading import TIMEOUT_MAX
from typing import Any

import pytest

from tlt_lightning import (
    BEGMABSelector,
    CostModelSelector,
    DynamicSampling,
    EarlierAnswers,
    LoRA,
    PartialRollout,
    PromptSource,
    RLModule,
    Sampling,
    TailBatching,
    objectives,
)
from tlt_lightning.callbacks.iteration_checkpoint import IterationCheckpoint
from tlt_lightning.drafter.packing import check_num_tokens
from tlt_lightning.drafter.teaching import Teaching
from tlt_lightning.long_tail.adaptive_budget import AdaptiveBudget
from tlt_lightning.long_tail.budget import FixedBudget
from tlt_lightning.long_tail.buffer import DrafterBuffer
from tlt_lightning.rewards import PythonTests, RewardModel, RewardPool, RewardTerm, exact_match
from tlt_lightning.speculation import BucketedGraphPool, FixedSelector, Strategy, ThresholdSelector
from tlt_lightning.speculation.selectors.acceptance import AcceptanceEstimator
from tlt_lightning.speculation.selectors.arms import make_arms

TINY = 1e-9


def pool(**arguments: float) -> None:
    RewardPool([RewardTerm(function=exact_match)], **arguments).close()  # type: ignore[arg-type]


def graphs(capture_sizes: int) -> None:
    BucketedGraphPool().plan({1: (Strategy(0),)}, (capture_sizes,))


def arms(num_draft_tokens: int) -> None:
    make_arms((num_draft_tokens,), ("learned",))


BOUNDS: list[tuple[Callable[..., Any], str, Sequence[Any], Sequence[Any]]] = [
    (check_num_tokens, "num_tokens", [128, 256], [0, 127, 129, -128]),
    (Teaching, "num_steps", [None, 1], [0]),
    (Teaching, "decay", [TINY, 1], [0, 1 + TINY]),
    (Teaching, "regression_weight", [0, 5], [-TINY]),
    (DynamicSampling, "max_rounds", [2], [1]),
    (LoRA, "alpha", [1], [0, -1]),
    (TailBatching, "extra", [0.01, 1], [0, 1.01]),
    (PartialRollout, "extra", [0.01, 1], [0, 1.01]),
    (PartialRollout, "max_policy_lag", [1], [0]),
    (AdaptiveBudget, "most", [TINY, 2], [0]),
    (AdaptiveBudget, "trial", [TINY, 2], [0]),
    (AdaptiveBudget, "overhead", [0], [-TINY, 1]),
    (AdaptiveBudget, "horizon", [2], [1]),
    (FixedBudget, "share", [0, 2], [-TINY]),
    (FixedBudget, "every_n_iterations", [1], [0]),
    (DrafterBuffer, "max_bytes", [1], [0]),
    (partial(DrafterBuffer, 1), "held_out_share", [0, 1 - TINY], [-TINY, 1]),
    (partial(DrafterBuffer, 1), "previous_share", [0, 1 - TINY], [-TINY, 1]),
    (EarlierAnswers, "max_tokens", [1], [0]),
    (EarlierAnswers, "ahead", [0], [-1]),
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
    (Sampling, "stop_strings", [("end", "done")], [("",), "done"]),
    (Strategy, "num_draft_tokens", [0], [-1]),
    (arms, "num_draft_tokens", [1], [0]),
    (graphs, "capture_sizes", [1], [0]),
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
    (AcceptanceEstimator, "max_draft_tokens", [1], [0]),
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
        (lambda: RewardTerm(function=exact_match, weight="1"), "weight"),  # type: ignore[arg-type]
        (lambda: RewardTerm(function=exact_match, name=3), "name"),  # type: ignore[arg-type]
        (lambda: PromptSource(path="README.md", chat_template=3), "chat_template"),  # type: ignore[arg-type]
        (lambda: PromptSource(path="README.md", prompt_column=None), "prompt_column"),  # type: ignore[arg-type]
        (lambda: PromptSource(path="README.md", chat_template_kwargs=3), "chat_template_kwargs"),  # type: ignore[arg-type]
        (lambda: IterationCheckpoint("folder", keep=1.5), "keep"),  # type: ignore[arg-type]
        (lambda: TailBatching("x"), "schedule.extra"),  # type: ignore[arg-type]
    ],
)
def test_a_value_of_another_type_is_refused_by_name(make: Callable[[], Any], name: str) -> None:
    with pytest.raises(TypeError, match=f"`{name}` must "):
        make()
