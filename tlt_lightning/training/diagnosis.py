"""Diagnose from an iteration's metrics why nothing is learned."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from statistics import fmean

import torch
from torch import Tensor

from tlt_lightning.sharding.units import local

PATIENCE = 3
"""Iterations in a row that must show a cause before it is said."""

WINDOW = 5
"""Iterations whose mean reward is compared with the best of as many."""

SAMPLE = 2**16
"""Most weights whose change is measured."""

LEAST_CHANGE = 3e-7
"""Relative change of the weights below which a policy stands still: AdamW at 1e-6 makes some 3e-5."""

MOST_CHANGE, MOST_KL, MOST_CLIPPED = 0.2, 0.3, 0.8
"""Relative change of the weights, `train/approx_kl` and `train/clip_fraction` of a policy that is torn away."""

Cause = tuple[str, str]
"""Its name, and a sentence with its remedy."""


class Diagnosis:
    """Finds why nothing is learned; says each cause once, when several iterations in a row show it.

    Args:
        is_grouped: Advantages compare the responses to one prompt.

    Example:
        >>> diagnosis = Diagnosis(is_grouped=True)
        >>> iteration = {"reward/mean": 1.0, "reward/std": 0.0, "reward/zero_std_groups": 1.0}
        >>> [len(diagnosis.read(iteration, change=1e-4)) for _ in range(5)]
        [0, 0, 1, 0, 0]
    """

    def __init__(self, *, is_grouped: bool) -> None:
        self._is_grouped = is_grouped
        self._has_moved = False
        self._rewards: deque[float] = deque(maxlen=WINDOW)
        self._best, self._spread = -float("inf"), 0.0  # mean of `WINDOW` iterations; of an iteration's responses
        self._in_a_row = {"rewards": 0, "rate": 0, "course": 0}  # iterations with a cause of the kind
        self._said: set[str] = set()

    def read(self, metrics: Mapping[str, float], change: float) -> list[str]:
        """Return the causes that an iteration makes certain, each with its remedy.

        Args:
            metrics: Of the iteration.
            change: What it has changed of the weights, relative to their norm.
        """
        self._has_moved |= change >= LEAST_CHANGE
        causes = []
        for kind, found in (
            ("rewards", _of_rewards(metrics, self._is_grouped)),
            ("rate", self._of_rate(metrics, change)),
            ("course", self._of_course(metrics)),
        ):
            self._in_a_row[kind] = self._in_a_row[kind] + 1 if found else 0
            if found and self._in_a_row[kind] >= PATIENCE and found[0] not in self._said:
                self._said.add(found[0])
                causes.append(found[1])
        return causes

    def _of_course(self, metrics: Mapping[str, float]) -> Cause | None:
        self._rewards.append(metrics.get("reward/mean", 0.0))
        self._spread = max(self._spread, metrics.get("reward/std", 0.0))
        if len(self._rewards) < WINDOW:
            return None
        recent = fmean(self._rewards)
        self._best = max(self._best, recent)
        if recent >= self._best - self._spread:
            return None
        return (
            "lost",
            f"the policy loses what it could: its mean reward over {WINDOW} iterations has fallen from "
            f"{self._best:.2g} to {recent:.2g}, by more than responses differ ({self._spread:.2g}). Unless prompts "
            "became harder, go on from a checkpoint of then with a lower learning rate (`model.optimizer`), more "
            "prompts an iteration (`data.prompts_per_iteration`) or a KL penalty (`objective.loss_kl`).",
        )

    def _of_rate(self, metrics: Mapping[str, float], change: float) -> Cause | None:
        gradient = metrics.get("train/grad_norm", 0.0)
        kl, clipped = metrics.get("train/approx_kl", 0.0), metrics.get("train/clip_fraction", 0.0)
        if gradient and not self._has_moved:
            return (
                "slow",
                f"the policy stands still: an iteration changes its weights by {change:.1g} of their size, "
                f"with gradients of norm {gradient:.2g}. Raise the learning rate (`model.optimizer`).",
            )
        if change > MOST_CHANGE or kl > MOST_KL or clipped > MOST_CLIPPED:
            return (
                "fast",
                f"updates are far too large: an iteration changes the weights by {change:.0%} of their size, "
                f"log-probs by {kl:.2g} nats a token (`train/approx_kl`), and {clipped:.0%} of the tokens are clipped. "
                "Lower the learning rate (`model.optimizer`), clip gradients (`trainer.gradient_clip_val`) or take "
                "fewer optimizer steps an iteration.",
            )
        return None


def _of_rewards(metrics: Mapping[str, float], is_grouped: bool) -> Cause | None:
    """Return at most one cause: an equal reward of all responses, or of all to the same prompt."""
    is_equal = metrics.get("reward/std", 1.0) < 1e-6
    if not is_equal and not (is_grouped and metrics.get("reward/zero_std_groups", 0.0) >= 1.0):
        return None
    mean, truncated = metrics.get("reward/mean", 0.0), metrics.get("rollout/truncated", 0.0)
    if truncated > 0.95:
        return (
            "truncated",
            f"{truncated:.0%} of the responses were cut off at `data.sampling.max_tokens`, and no reward "
            "tells them apart. Raise `max_tokens`, or check that the policy knows how to end (its chat template and "
            "end token).",
        )
    if not is_equal:
        return (
            "groups",
            "all responses to the same prompt earned the same, for every prompt, so that all advantages are "
            "0. The prompts are too easy or too hard: mix in others, raise `data.group_size` or "
            "`data.sampling.temperature`, or set `data.dynamic_sampling`.",
        )
    if mean == 0:
        return (
            "zero",
            "every reward was 0. Read completions (`show_completions` of `RolloutProgressBar`): where they "
            "hold right answers the reward does not find them; where they hold none, ask for the format in the prompt, "
            "or begin with easier prompts.",
        )
    return (
        "constant",
        f"every reward was {mean:.4g}: it tells no two responses apart. Give harder prompts if this is its "
        "best value, and check the reward function if not.",
    )


def sample_of(parameters: Sequence[Tensor]) -> Tensor:
    """Return some of the weights of this rank, always the same ones, in float32 on the CPU."""
    own = [local(parameter.detach()).reshape(-1) for parameter in parameters]
    stride = 1 + sum(parameter.numel() for parameter in own) // SAMPLE
    return torch.cat([parameter[::stride].float().cpu() for parameter in own])


def change_of(before: Tensor, after: Tensor) -> float:
    """Return the norm of a change relative to what was there before, or is now."""
    size = max(float(before.norm()), float(after.norm()))
    return float((after - before).norm()) / size if size else 0.0
