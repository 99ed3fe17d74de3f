"""List the metrics that a run may log, by name."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase

_OF_ROOMS = {
    "mismatch": "effective_sample_size is_weight_mean kl logp_abs_diff ratio_max surprise truncated",
    "reward": "mean std zero_std_groups",
    "rollout": "groups_drawn groups_without_signal_kept length_max length_mean length_p50 length_p90 length_p99 "
    "seconds tail_share tokens tokens_per_s truncated variety",
    "train": "approx_kl clip_fraction entropy explained_variance grad_norm kl loss mfu passes tflop tokens "
    "tokens_per_s value_loss",
    "val": "accuracy length reward",
}
NAMES = [f"{room}/{name}" for room, names in _OF_ROOMS.items() for name in names.split()]
FAMILIES = ["drafter/*", "idle/*", "memory/*", "schedule/*", "speculation/*", "time/*", "val/pass@*", "lr-*"]
"""Patterns of names that depend on the run; a LearningRateMonitor logs the last."""
_OF_LIGHTNING = ["epoch", "step"]


def is_known(name: str, rewards: Sequence[str]) -> bool:
    """Return True for a metric that a run with these rewards may log by itself."""
    return any(fnmatchcase(name, each) for each in (*NAMES, *_of(rewards), *FAMILIES, *_OF_LIGHTNING))


def close_to(name: str, rewards: Sequence[str]) -> list[str]:
    """Return metrics of a run with these rewards whose names are nearly `name`, the closest first."""
    return get_close_matches(name, [*NAMES, *_of(rewards)], cutoff=0.8)


def _of(rewards: Sequence[str]) -> list[str]:
    names = [f"reward/{name}" for name in rewards]
    return [name + kind for name in names for kind in ("", "_errors", "_timeouts")]
