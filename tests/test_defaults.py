"""Numbers that a run gets unless it names others; recipes and results rely on them, so a change is one here too."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

import tlt_lightning as tlt
from tlt_lightning import objectives, rewards
from tlt_lightning.drafter.quality import AcceptanceRule
from tlt_lightning.drafter.teaching import Teaching
from tlt_lightning.long_tail.budget import AdaptiveBudget, FixedBudget
from tlt_lightning.long_tail.buffer import DrafterBuffer
from tlt_lightning.speculation.alarm import AcceptanceAlarm
from tlt_lightning.speculation.controller import StrategyController
from tlt_lightning.speculation.selectors.acceptance import AcceptanceEstimator
from tlt_lightning.speculation.selectors.step_time import StepTimeModel

DEFAULTS: dict[Callable[..., Any], dict[str, Any]] = {
    tlt.RolloutDataModule: {
        "group_size": 8,
        "prompts_per_iteration": 32,
        "micro_batch_tokens": None,
        "num_minibatches": 1,
        "inner_epochs": 1,
        "sampling": tlt.Sampling(),
        "val_group_size": 1,
        "max_prompt_tokens": None,
        "reward_timeout": 10.0,
    },
    tlt.Sampling: {"max_tokens": 1024, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "min_tokens": 0},
    tlt.DynamicSampling: {"max_rounds": 4},
    tlt.RolloutBatch: {"temperature": 1.0, "num_loss_tokens": 0.0, "num_loss_sequences": 0.0, "num_shares": 1},
    tlt.RolloutDemand: {"is_first": True, "least_deferred": None},
    tlt.PendingGroup: {"deferrals": 0, "responses": (), "expected_tokens": 0.0},
    tlt.PartialRollout: {"extra": 0.5, "max_policy_lag": 2},
    tlt.TailBatching: {"extra": 0.25},
    tlt.DrafterDataModule: {"num_tokens": 4096, "val_share": 0.1, "seed": 0},
    AcceptanceRule: {"samples_drafts": False, "temperature": 1.0, "shares_noise": False},
    Teaching: {"decay": 1.0},
    AdaptiveBudget: {"most": 1.0, "trial": 0.5, "overhead": 0.005, "horizon": 50},
    FixedBudget: {"share": 0.1, "every_n_iterations": 1},
    rewards.PythonTests: {"time_limit": 5.0, "memory_mb": 1024},
    rewards.RewardModel: {"max_length": 4096},
    rewards.RewardPool: {"num_workers": 4, "timeout": 10.0},
    rewards.RewardTerm: {"weight": 1.0},
    tlt.BEGMABSelector: {
        "groups": ((5, 3, 1), (3, 1)),
        "thresholds": (1, 49),
        "epsilon": 0.02,
        "window": 12,
        "pull_size": 12,
        "seed": 0,
    },
    tlt.CostModelSelector: {
        "num_draft_tokens": (1, 3, 5, 7),
        "max_batch_tokens": 512,
        "exploration": 0.01,
        "margin": 0.02,
        "catch_up_seconds": 0.01,
    },
    tlt.FixedSelector: {"num_draft_tokens": 3},
    tlt.ThresholdSelector: {"num_draft_tokens": 3, "max_running": 32, "band": 8},
    tlt.Strategy: {"num_draft_tokens": 0},
    tlt.SelectorState: {"mean_context": 0.0, "drafter_version": -1, "waiting": 0},
    tlt.MeasuredStep: {"error": 0.1},
    AcceptanceAlarm: {"window": 512},
    AcceptanceEstimator: {"window": 100},
    StepTimeModel: {"window": 300},
    DrafterBuffer: {"held_out_share": 0.25, "previous_share": 0.25},
    StrategyController: {"steps_per_choice": 2},
    objectives.CappedRatio: {"max_ratio": 5.0, "min_ratio": 0.0},
    objectives.ClippedRatio: {"clip_low": 0.2, "clip_high": 0.28},
    objectives.GAE: {"gamma": 1.0, "lam": 0.95},
    objectives.GroupNormalized: {"epsilon": 1e-6},
    objectives.KLPenalty: {"coef": 0.001},
    objectives.MaskedImportance: {"keep_above": 0.5, "keep_below": 5.0},
    objectives.TruncatedImportance: {"max_weight": 2.0},
    objectives.PPO: {"entropy_coef": 0.0, "value_coef": 1.0, "value_clip": 0.2},
    objectives.SequenceMeanTokenSumNorm: {"max_tokens": 1024},
    objectives.SequenceRatio: {"sequence_clip_low": 3e-4, "sequence_clip_high": 4e-4},
    objectives.SoftGate: {"temperature_positive": 1.0, "temperature_negative": 1.05},
    objectives.WhitenedRewardToGo: {"gamma": 1.0},
}


@pytest.mark.parametrize("made", DEFAULTS, ids=lambda made: made.__name__)
def test_a_number_that_nobody_names_is_the_one_that_others_rely_on(made: Callable[..., Any]) -> None:
    defaults = {name: argument.default for name, argument in inspect.signature(made).parameters.items()}
    assert {name: defaults[name] for name in DEFAULTS[made]} == DEFAULTS[made]
