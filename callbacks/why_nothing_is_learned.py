"""Hear why nothing is learned: each cause once, with its remedy. A run has this callback unless it is given one."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping
from statistics import fmean
from typing import Any

import lightning as L
import torch
from torch import Tensor

from tlt_lightning import RolloutCallback

log = logging.getLogger(__name__)

SAMPLE = 2**16
"""Most weights whose change is measured."""

LEAST_CHANGE = 3e-7
"""Relative change of the weights below which a policy stands still: AdamW at 1e-6 makes some 3e-5."""

MOST_CHANGE, MOST_KL, MOST_CLIPPED = 0.2, 0.3, 0.8
"""Relative change of the weights, `train/approx_kl` and `train/clip_fraction` of a policy that is torn away."""


class WhyNothingIsLearned(RolloutCallback):
    """Warns, once per cause, when several iterations in a row show why nothing is learned.

    Args:
        patience: Iterations in a row that must show a cause.
        window: Iterations whose mean reward is compared with the best of as many.

    Example:
        callbacks+:
          - class_path: tlt_lightning.gallery.why_nothing_is_learned.WhyNothingIsLearned
            init_args: {patience: 3, window: 5}
    """

    def __init__(self, patience: int = 3, window: int = 5) -> None:
        self.patience, self.window = patience, window
        self._forget()

    def _forget(self) -> None:
        self._has_moved, self._said = False, set[str]()
        self._rewards: deque[float] = deque(maxlen=self.window)
        self._best, self._spread = -float("inf"), 0.0  # mean of `window` iterations; of an iteration's responses
        self._in_a_row = {"rewards": 0, "rate": 0, "course": 0}  # iterations with a cause of the kind

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Forget the run before, and keep some of the weights that are trained: a callback may freeze others."""
        self._forget()
        self._trained = [each for each in pl_module.policy.parameters() if each.requires_grad]
        self._weights = sample_of(self._trained)

    def on_iteration_end(
        self, trainer: L.Trainer, pl_module: Any, iteration: int, metrics: Mapping[str, float]
    ) -> None:
        """Say what this iteration has made certain."""
        before, self._weights = self._weights, sample_of(self._trained)
        objective, change = pl_module.objective, change_of(before, self._weights)
        causes = self.causes(metrics, change, objective.min_group_size > 1, learns_from_rewards=objective.needs_rewards)
        for cause in causes if trainer.is_global_zero else ():
            log.warning("Iteration %d: why nothing is learned: %s", iteration, cause)

    def causes(
        self, metrics: Mapping[str, float], change: float, is_grouped: bool, *, learns_from_rewards: bool = True
    ) -> list[str]:
        """Return the causes that an iteration makes certain, each with its remedy.

        Args:
            metrics: Of the iteration.
            change: What it has changed of the weights, relative to their norm.
            is_grouped: Advantages compare the responses to one prompt.
            learns_from_rewards: Equal rewards are a cause.
        """
        self._has_moved |= change >= LEAST_CHANGE
        found = {
            "rewards": _of_rewards(metrics, is_grouped) if learns_from_rewards else ("", ""),
            "rate": self._of_rate(metrics, change),
            "course": self._of_course(metrics),
        }
        certain = []
        for kind, (name, sentence) in found.items():
            self._in_a_row[kind] = self._in_a_row[kind] + 1 if name else 0
            if name and self._in_a_row[kind] >= self.patience and name not in self._said:
                self._said.add(name)
                certain.append(sentence)
        return certain

    def _of_course(self, metrics: Mapping[str, float]) -> tuple[str, str]:
        self._rewards.append(metrics.get("reward/mean", 0.0))
        self._spread = max(self._spread, metrics.get("reward/std", 0.0))
        recent = fmean(self._rewards) if len(self._rewards) == self.window else self._best
        self._best = max(self._best, recent)
        if recent >= self._best - self._spread:
            return "", ""
        return "lost", (
            f"the policy loses what it could: its mean reward over {self.window} iterations has fallen from "
            f"{self._best:.2g} to {recent:.2g}, by more than responses differ ({self._spread:.2g}). Unless prompts "
            "became harder, go on from a checkpoint of then with a lower learning rate (`model.optimizer`), more "
            "prompts an iteration (`data.prompts_per_iteration`) or a KL penalty (`objective.loss_kl`)."
        )

    def _of_rate(self, metrics: Mapping[str, float], change: float) -> tuple[str, str]:
        gradient = metrics.get("train/grad_norm", 0.0)
        kl, clipped = metrics.get("train/approx_kl", 0.0), metrics.get("train/clip_fraction", 0.0)
        if gradient and not self._has_moved:
            return "slow", (
                f"the policy stands still: an iteration changes its weights by {change:.1g} of their size, "
                f"with gradients of norm {gradient:.2g}. Raise the learning rate (`model.optimizer`)."
            )
        if change > MOST_CHANGE or kl > MOST_KL or clipped > MOST_CLIPPED:
            return "fast", (
                f"updates are far too large: an iteration changes the weights by {change:.0%} of their size, "
                f"log-probs by {kl:.2g} nats a token (`train/approx_kl`), and {clipped:.0%} of the tokens are clipped. "
                "Lower the learning rate (`model.optimizer`), clip gradients (`trainer.gradient_clip_val`) or take "
                "fewer optimizer steps an iteration."
            )
        return "", ""


def _of_rewards(metrics: Mapping[str, float], is_grouped: bool) -> tuple[str, str]:
    """Return at most one cause: an equal reward of all responses, or of all to the same prompt."""
    is_equal = metrics.get("reward/std", 1.0) < 1e-6
    if not is_equal and not (is_grouped and metrics.get("reward/zero_std_groups", 0.0) >= 1.0):
        return "", ""
    mean, truncated = metrics.get("reward/mean", 0.0), metrics.get("rollout/truncated", 0.0)
    if truncated > 0.95:
        return "truncated", (
            f"{truncated:.0%} of the responses were cut off at `data.sampling.max_tokens`, and no reward tells them "
            "apart. Raise `max_tokens`, or check that the policy knows how to end (its chat template and end token)."
        )
    if not is_equal:
        return "groups", (
            "all responses to the same prompt earned the same, for every prompt, so that all advantages are 0. The "
            "prompts are too easy or too hard: mix in others, raise `data.group_size` or "
            "`data.sampling.temperature`, or set `data.dynamic_sampling`."
        )
    if mean == 0:
        return "zero", (
            "every reward was 0. Read completions (`show_completions` of `RolloutProgressBar`): where they hold right "
            "answers the reward does not find them; where they hold none, ask for the format in the prompt, or begin "
            "with easier prompts."
        )
    return "constant", (
        f"every reward was {mean:.4g}: it tells no two responses apart. Give harder prompts if this is its best value, "
        "and check the reward function if not."
    )


def sample_of(parameters: list[Tensor]) -> Tensor:
    """Return some of the weights of this rank, always the same ones, in float32 on the CPU."""
    ranks_own = [getattr(each.detach(), "to_local", each.detach)().reshape(-1) for each in parameters]
    stride = 1 + sum(each.numel() for each in ranks_own) // SAMPLE
    return torch.cat([each[::stride].float().cpu() for each in ranks_own])


def change_of(before: Tensor, after: Tensor) -> float:
    """Return the norm of a change relative to what was there before, or is now."""
    size = max(float(before.norm()), float(after.norm()))
    return float((after - before).norm()) / size if size else 0.0
