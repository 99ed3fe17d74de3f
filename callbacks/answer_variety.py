"""Log a metric of your own: how many different answers the policy gives to the same prompt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import lightning as L

from tlt_lightning import Rollout, RolloutCallback


class AnswerVariety(RolloutCallback):
    """Logs `rollout/variety`, the share of responses that none to the same prompt repeats.

    The share falls to 0 when the policy has collapsed onto one answer per prompt, from where no reward can move it.

    Example:
        callbacks+:
          - class_path: tlt_lightning.gallery.answer_variety.AnswerVariety
    """

    def on_rollout_end(self, trainer: L.Trainer, pl_module: Any, rollouts: Sequence[Rollout]) -> None:
        """Count in training; the log averages over ranks and hands the metric to the loggers."""
        if trainer.training:
            times = Counter((rollout.group, rollout.text) for rollout in rollouts)
            pl_module.iteration_log.mean("rollout/variety", [*times.values()].count(1) / len(rollouts))
