"""List the metrics that a run logs, by name."""

from __future__ import annotations

from typing import Any

_OF_ROOMS = {
    "mismatch": "effective_sample_size is_weight_mean kl logp_abs_diff ratio_max surprise truncated",
    "reward": "mean std zero_std_groups",
    "rollout": "groups_drawn groups_without_signal_kept length_max length_mean length_p50 length_p90 length_p99 "
    "seconds tail_share tokens tokens_per_s truncated variety",
    "train": "approx_kl clip_fraction entropy explained_variance grad_norm kl loss lr mfu passes tflop tokens "
    "tokens_per_s value_loss",
    "val": "accuracy length reward",
}
NAMES = [f"{room}/{name}" for room, names in _OF_ROOMS.items() for name in names.split()]
FAMILIES = ["drafter/*", "idle/*", "memory/*", "schedule/*", "speculation/*", "time/*", "lr-*", "epoch", "step"]
"""Patterns of names that cannot be told beforehand, and names of Lightning and its LearningRateMonitor."""


def names_of(module: Any, data: Any) -> list[str]:
    """Return the names that a fit of an `RLModule` with a `RolloutDataModule` logs, but for those of `FAMILIES`."""
    objective = module.objective
    comes = {"train/kl": objective.needs_reference}
    comes |= dict.fromkeys(("train/value_loss", "train/explained_variance"), objective.needs_critic)
    dynamic = ("rollout/groups_drawn", "rollout/groups_without_signal_kept")
    comes |= dict.fromkeys(dynamic, data.dynamic_sampling is not None)
    rewards = [f"reward/{term.name}" for term in data.rewards]
    rewards = [name + kind for name in rewards for kind in ("", "_errors", "_timeouts")]
    powers = [f"val/pass@{1 << each}" for each in range(1, int(data.val_group_size).bit_length())]
    return [*(name for name in NAMES if comes.get(name, True)), *rewards, *powers]
