"""Let callbacks of Lightning that follow a metric look at it where it is new."""

import os
import re
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

_OF_ITERATION = ("mismatch/", "reward/", "rollout/", "schedule/", "time/", "train/")
_BETTER_IF_HIGH = r"reward/mean|val/(accuracy|reward|pass@\d+)"


def is_of_iteration(metric: str | None) -> bool:
    """Return True for a metric that each iteration logs where it ends, behind its validation."""
    return metric is not None and metric.startswith(_OF_ITERATION)


def watch_iteration_end(trainer: L.Trainer, callback: L.Callback) -> None:
    """Let a ModelCheckpoint or EarlyStopping look where its metric is new: at an iteration's end, or at a validation.

    Left to Lightning, it looks behind a validation wherever not every iteration has one, at what the iteration before
    logged.

    Raises:
        MisconfigurationException: It follows no validation, saves within iterations or takes a lower reward for better.
    """
    if trainer.fast_dev_run:  # type: ignore[attr-defined]  # which has neither
        return
    metric: str | None
    if isinstance(callback, EarlyStopping):
        attribute, is_plain, metric = "_check_on_train_epoch_end", False, callback.monitor
        has_limit = callback.stopping_threshold is not None or callback.divergence_threshold is not None
    elif isinstance(callback, ModelCheckpoint):
        attribute, has_limit, metric = "_save_on_train_epoch_end", False, callback.monitor
        is_plain = metric is None and "{val/" not in str(callback.filename)
        for other in ("every_n_train_steps", "train_time_interval"):
            if given := getattr(callback, f"_{other}"):
                raise MisconfigurationException(
                    f"`ModelCheckpoint({other}={given})` saves within iterations, before their metrics are known; give "
                    "`every_n_epochs` instead, one epoch is one policy iteration, or use `IterationCheckpoint`."
                )
    else:
        return
    if is_of_iteration(metric) or (is_plain and getattr(callback, attribute) is None):
        setattr(callback, attribute, True)  # in a validation, too: EarlyStopping settles it in the first `setup`
    elif metric is not None and metric.startswith("val/"):
        setattr(callback, attribute, None)  # Lightning then looks where there is one
    if metric is not None and trainer.state.fn == "fit":
        who = f"{type(callback).__name__}(monitor={metric!r})"
        check_followed(trainer, who, metric, callback.mode, has_limit=has_limit)


def check_followed(trainer: L.Trainer, who: str, metric: str, mode: str, *, has_limit: bool = False) -> None:
    """Raise MisconfigurationException if there is no validation to follow, or `who` takes a lower reward for better."""
    data: Any = trainer.datamodule  # type: ignore[attr-defined]
    if metric.startswith("val/") and (trainer.limit_val_batches == 0 or getattr(data, "val", True) is None):
        raise MisconfigurationException(
            f"`{who}` follows a validation, and this run has none: set `data.val`, and leave "
            "`Trainer(limit_val_batches)` above 0, or follow `reward/mean`."
        )
    if mode == "min" and not has_limit and re.fullmatch(_BETTER_IF_HIGH, metric):
        raise MisconfigurationException(
            f"`{who}` has `mode` 'min', the default, and would take a lower `{metric}` for a better one; give "
            "`mode='max'`."
        )


def validates_by_iteration(trainer: L.Trainer) -> bool:
    """Return True if a run's validations come with every so many iterations, not by steps over them or by the clock."""
    return trainer.check_val_every_n_epoch is not None and not getattr(trainer, "_val_check_time_interval", None)


def save_followed(callback: ModelCheckpoint, trainer: L.Trainer, candidates: dict[str, Any]) -> None:
    """Replace `ModelCheckpoint._save_monitor_checkpoint`, which would save nothing for want of its metric.

    Nor would it ever remove a checkpoint again in a run that is resumed with a smaller `save_top_k`.
    """
    metric = str(callback.monitor)
    if metric not in candidates and (is_of_iteration(metric) or not sum(trainer.num_val_batches)):
        raise MisconfigurationException(
            f"`ModelCheckpoint(monitor={metric!r})` would save nothing, for the first iteration has not logged "
            f"`{metric}`; choose one of {', '.join(sorted(candidates))}."
        )
    needed = _remove_surplus(callback, trainer)
    type(callback)._save_monitor_checkpoint(callback, trainer, candidates)
    callback.best_k_models.update(needed)  # until they can be removed


def _remove_surplus(callback: ModelCheckpoint, trainer: L.Trainer) -> dict[str, Tensor]:
    """Forget checkpoints beyond `save_top_k` and remove their files; return those that are still needed."""
    kept, most, needed = callback.best_k_models, callback.save_top_k, dict[str, Tensor]()
    if not 0 < most < len(kept):
        return needed
    best_first = sorted(kept, key=kept.__getitem__, reverse=callback.mode == "max")  # of equals `best_model_path`
    linked, callback.kth_best_model_path = os.path.realpath(callback.last_model_path), best_first[most - 1]
    for path in best_first[most:]:
        score = kept.pop(path)
        if callback._should_remove_checkpoint(trainer, path, linked):
            callback._remove_checkpoint(trainer, path)
        else:
            needed[path] = score
    return needed
