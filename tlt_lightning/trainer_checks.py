"""Trainer settings that on-policy learning cannot honour, refused before anything is loaded."""

from __future__ import annotations

import lightning as L
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException

PRECISIONS = ("32-true", "bf16-mixed")


def check_trainer(trainer: L.Trainer) -> None:
    """Raise MisconfigurationException for a setting under which a run would be wrong or could not resume exactly."""
    if trainer.max_steps != -1:
        raise MisconfigurationException(
            f"`Trainer(max_steps={trainer.max_steps})` counts optimizer steps and cannot resume an iteration exactly; "
            "give the number of policy iterations as `max_epochs` instead."
        )
    if trainer.precision not in PRECISIONS:
        raise MisconfigurationException(
            f"`Trainer(precision={trainer.precision!r})` is not supported: advantages and log-probs would be rounded. "
            f"Use one of {', '.join(PRECISIONS)}."
        )
    strategy = trainer.strategy
    launched_per_process = getattr(strategy, "_start_method", None) in (None, "popen")
    if not isinstance(strategy, SingleDeviceStrategy | DDPStrategy) or not launched_per_process:
        raise MisconfigurationException(
            f"`Trainer(strategy=...)` is {type(strategy).__name__}"
            f"{'' if launched_per_process else ' with spawned or forked processes'}, which is not supported. "
            "Use `auto` on one device and `ddp` on several."
        )
    all_batches = isinstance(trainer.limit_train_batches, float) and trainer.limit_train_batches == 1.0
    if not all_batches or trainer.overfit_batches:  # an int of 1 is one batch, a float all of them
        raise MisconfigurationException(
            "`Trainer(limit_train_batches, overfit_batches)` would drop part of every iteration's rollouts; lower "
            "`data.prompts_per_iteration` instead."
        )
    if trainer.reload_dataloaders_every_n_epochs:
        raise MisconfigurationException(
            "`Trainer(reload_dataloaders_every_n_epochs)` is not needed: every epoch rolls out anew. Leave it at 0."
        )
