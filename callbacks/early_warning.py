"""Hear early that a run has gone wrong, in the usual ways of reinforcement learning."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import lightning as L
from lightning.pytorch.utilities import rank_zero_warn

from tlt_lightning import Rollout, RolloutCallback, zero_std_share

MIN_EARLIER_ITERATIONS = 3


class RewardLengthWarning(RolloutCallback):
    """Warns, once per cause, when rewards or lengths go wrong or too little can be learned.

    Reward and length are compared with their means over the preceding iterations, from the fourth iteration on. It
    looks at rank zero's rollouts of training; means and warnings given are part of the checkpoint.

    Args:
        reward_drop: Warn when the mean reward is more than this below its running mean, in units of reward.
        length_factor: Warn when the mean length is more than this many times its running mean, or less than one
            such part of it.
        max_truncated: Warn when more than this share of the responses is cut off at the length limit.
        max_zero_std: Warn when in more than this share of the groups all rewards are equal, which leaves
            group-normalised advantages at zero.
        window: Iterations that the running means go back.

    Example:
        callbacks+:
          - class_path: tlt_lightning.gallery.early_warning.RewardLengthWarning
            init_args: {reward_drop: 0.3, length_factor: 2.0, max_truncated: 0.3}
    """

    def __init__(
        self,
        reward_drop: float = 0.2,
        length_factor: float = 2.0,
        max_truncated: float = 0.5,
        max_zero_std: float = 0.9,
        window: int = 10,
    ) -> None:
        if length_factor <= 1:
            raise ValueError(f"`length_factor` must be greater than 1, got {length_factor}.")
        if window < MIN_EARLIER_ITERATIONS:
            raise ValueError(f"`window` must be at least {MIN_EARLIER_ITERATIONS}, got {window}.")
        self.reward_drop, self.length_factor = reward_drop, length_factor
        self.max_truncated, self.max_zero_std = max_truncated, max_zero_std
        self.rewards: deque[float] = deque(maxlen=window)
        self.lengths: deque[float] = deque(maxlen=window)
        self.warned: set[str] = set()

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Forget the run before; a checkpoint's state comes later."""
        if stage == "fit" and not trainer.global_step:
            self.load_state_dict({"rewards": (), "lengths": (), "warned": ()})

    def on_rollout_end(self, trainer: L.Trainer, pl_module: L.LightningModule, rollouts: Sequence[Rollout]) -> None:
        """Compare this iteration with the ones before and warn."""
        if not trainer.training:
            return
        reward = fmean(rollout.reward for rollout in rollouts)
        length = fmean(rollout.response.num_written for rollout in rollouts)
        causes = self._share_causes(rollouts)
        if len(self.rewards) >= MIN_EARLIER_ITERATIONS:
            usual_reward, usual_length = fmean(self.rewards), fmean(self.lengths)
            against = f"{reward:.3f} against {usual_reward:.3f} before; lower the learning rate, or add a KL penalty."
            causes["reward collapsed"] = (reward < usual_reward - self.reward_drop, against)
            against = f"{length:.0f} tokens on average against {usual_length:.0f} before; read some completions."
            causes["lengths exploded"] = (length > usual_length * self.length_factor, against)
            causes["lengths collapsed"] = (length < usual_length / self.length_factor, against)
        for cause, (is_present, details) in causes.items():
            if is_present and cause not in self.warned:
                self.warned.add(cause)
                rank_zero_warn(f"Iteration {trainer.current_epoch + 1}: {cause}: {details}")
        self.rewards.append(reward)
        self.lengths.append(length)

    def _share_causes(self, rollouts: Sequence[Rollout]) -> dict[str, tuple[bool, str]]:
        truncated = fmean(rollout.is_truncated for rollout in rollouts)
        has_groups = len({rollout.group for rollout in rollouts}) < len(rollouts)
        zero_std = zero_std_share(rollouts) if has_groups else 0.0
        return {
            "many responses truncated": (truncated > self.max_truncated, f"{truncated:.0%}; raise `max_tokens`."),
            "little to learn from": (zero_std > self.max_zero_std, f"{zero_std:.0%} of the groups have equal rewards."),
        }

    def state_dict(self) -> dict[str, Any]:
        """Running means and warnings given, as primitives."""
        return {"rewards": list(self.rewards), "lengths": list(self.lengths), "warned": sorted(self.warned)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where the checkpointed run was."""
        self.rewards = deque(state_dict["rewards"], self.rewards.maxlen)
        self.lengths = deque(state_dict["lengths"], self.lengths.maxlen)
        self.warned = set(state_dict["warned"])
