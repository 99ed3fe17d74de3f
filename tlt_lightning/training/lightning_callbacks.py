"""Refuse callbacks of Lightning that policy iterations cannot honour; let those that follow a metric find it new."""

from __future__ import annotations

import re
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BatchSizeFinder,
    DeviceStatsMonitor,
    EarlyStopping,
    LearningRateFinder,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelPruning,
    StochasticWeightAveraging,
    ThroughputMonitor,
)
from lightning.pytorch.utilities.exceptions import MisconfigurationException

_OF_ITERATION = ("mismatch/", "reward/", "rollout/", "schedule/", "time/", "train/")
_BETTER_IF_HIGH = r"reward/mean|val/(accuracy|reward|pass@\d+)"

_LOGGING = DeviceStatsMonitor | LearningRateMonitor | ThroughputMonitor
_UNFIT = {
    BaseFinetuning: "freezes layers before the policy is loaded; freeze them in `on_fit_start` of a callback of your "
    "own, as `pl_module.policy.get_input_embeddings().requires_grad_(False)` does, or train adapters (`model.lora`).",
    ModelPruning: "renames the weights that it prunes, and the engine would not find them; drop the callback.",
    StochasticWeightAveraging: "copies the module before the policy is loaded and would average nothing; use "
    "`EMAWeightAveraging`, which averages the policy's weights.",
}


def is_of_iteration(metric: str | None) -> bool:
    """Return True for a metric that each iteration logs where it ends, behind its validation."""
    return metric is not None and metric.startswith(_OF_ITERATION)


def check_callback(trainer: L.Trainer, callback: L.Callback) -> None:
    """Raise MisconfigurationException for a callback of Lightning that policy iterations cannot honour."""
    name = type(callback).__name__
    for kind, reason in _UNFIT.items():
        if isinstance(callback, kind):
            raise MisconfigurationException(f"`{name}` {reason}")
    if isinstance(callback, _LOGGING) and trainer.state.fn == "fit" and not trainer.loggers:
        raise MisconfigurationException(
            f"`{name}` logs, and `Trainer(logger=False)` has no logger; give one, for example `CSVLogger(folder)`, or "
            "drop the callback."
        )
    if isinstance(callback, BatchSizeFinder | LearningRateFinder):
        raise MisconfigurationException(
            f"`Tuner` and `{name}` try settings on fixed batches, and here the policy writes each "
            "batch: compare short runs (`max_epochs`) with other values of `optimizer` and `data` instead."
        )
    if isinstance(callback, ModelCheckpoint):
        metric = re.search(r"\{([^{}:]*/[^{}:]*)", callback.filename or "")
        if metric and callback.auto_insert_metric_name:
            raise MisconfigurationException(
                f"`ModelCheckpoint(filename={callback.filename!r})` would make a folder of the slash in `{metric[1]}`; "
                f"write the name out, as in `{metric[1].replace('/', '_')}={{{metric[1]}:.2f}}`, and set "
                "`auto_insert_metric_name=False`."
            )
        values = callback._every_n_train_steps or None, callback._train_time_interval
        for argument, value in zip(("every_n_train_steps", "train_time_interval"), values, strict=True):
            if value is not None:
                raise MisconfigurationException(
                    f"`ModelCheckpoint({argument}={value})` saves within iterations, before their metrics are known; "
                    "give `every_n_epochs` instead, one epoch is one policy iteration, or use `IterationCheckpoint`."
                )


def look_when_known(trainer: L.Trainer, callback: L.Callback) -> None:
    """Let a ModelCheckpoint or EarlyStopping look where an iteration ends, unless it follows a validation.

    Left to Lightning, it looks behind a validation wherever not every iteration has one, at what the iteration before
    logged. Raise MisconfigurationException if its metric is not known where it is to look, or the wrong way round.
    """
    if trainer.fast_dev_run:  # type: ignore[attr-defined]  # which has neither
        return
    if isinstance(callback, EarlyStopping):
        argument, is_plain, metrics = "check_on_train_epoch_end", False, [callback.monitor]
        has_limit = callback.stopping_threshold is not None or callback.divergence_threshold is not None
    elif isinstance(callback, ModelCheckpoint):
        argument, has_limit = "save_on_train_epoch_end", False
        is_plain = callback.monitor is None and "{val/" not in str(callback.filename)
        metrics = [] if callback.monitor is None else [callback.monitor]
    else:
        return
    at_end = getattr(callback, f"_{argument}")
    if at_end is None and (is_plain or any(map(is_of_iteration, metrics))):
        setattr(callback, f"_{argument}", True)  # in a validation, too: EarlyStopping settles it in the first `setup`
    name = type(callback).__name__
    for metric in metrics if trainer.state.fn == "fit" else ():
        check_followed(trainer, f"{name}(monitor={metric!r})", metric, callback.mode, has_limit=has_limit)
        if at_end is False and is_of_iteration(metric):
            raise MisconfigurationException(
                f"`{name}({argument}=False)` looks behind a validation, where `{metric}` is that of the iteration "
                f"before; leave `{argument}` out."
            )
        validates_always = trainer.check_val_every_n_epoch == 1 and validates_by_iteration(trainer)
        if at_end and metric.startswith("val/") and not validates_always:
            raise MisconfigurationException(
                f"`{name}({argument}=True)` looks where each iteration ends, and `{metric}` is not known in all of "
                f"them: leave `{argument}` out, or set `Trainer(check_val_every_n_epoch=1)`."
            )


def check_followed(trainer: L.Trainer, who: str, metric: str, mode: str, *, has_limit: bool = False) -> None:
    """Raise MisconfigurationException if a run logs or validates nothing, or `who` takes a lower reward for better."""
    if trainer.barebones:
        raise MisconfigurationException(
            f"`{who}` follows what is logged, and `Trainer(barebones=True)` logs nothing; leave one of them out."
        )
    if metric.startswith("val/") and (reason := _why_no_validation(trainer)):
        raise MisconfigurationException(
            f"`{who}` follows a validation, and this run has none: {reason}. Follow `reward/mean`, or let it validate."
        )
    if mode == "min" and not has_limit and re.fullmatch(_BETTER_IF_HIGH, metric):
        raise MisconfigurationException(
            f"`{who}` has `mode` 'min', the default, and would take a lower `{metric}` for a better one; give "
            "`mode='max'`."
        )


def _why_no_validation(trainer: L.Trainer) -> str:
    data: Any = trainer.datamodule  # type: ignore[attr-defined]
    every, last = trainer.check_val_every_n_epoch, trainer.max_epochs
    if data is not None and getattr(data, "val", True) is None:
        return "`data.val` is not set"
    if trainer.limit_val_batches == 0:
        return "`Trainer(limit_val_batches=0)`"
    if every is not None and last is not None and 0 <= last < every:
        return f"`Trainer(check_val_every_n_epoch={every})` is more than `max_epochs` {last}"
    settings, interval = getattr(data, "_settings", None), getattr(trainer, "val_check_interval", None)
    if every is None and isinstance(interval, int) and settings is not None and last is not None:
        num_steps = last * settings.num_steps
        if 0 <= num_steps < interval:
            return f"`val_check_interval` {interval} is more than the {num_steps} optimizer steps of {last} iterations"
    return ""


def validates_by_iteration(trainer: L.Trainer) -> bool:
    """Return True if a run's validations come with every so many iterations, not by steps over them or by the clock."""
    return trainer.check_val_every_n_epoch is not None and not getattr(trainer, "_val_check_time_interval", None)


def save_followed(callback: ModelCheckpoint, trainer: L.Trainer, candidates: dict[str, Any]) -> None:
    """Replace `ModelCheckpoint._save_monitor_checkpoint`, which would save nothing for want of its metric."""
    metric = str(callback.monitor)
    if metric not in candidates and (is_of_iteration(metric) or not sum(trainer.num_val_batches)):
        raise MisconfigurationException(
            f"`ModelCheckpoint(monitor={metric!r})` would save nothing, for the first iteration has not logged "
            f"`{metric}`; choose one of {', '.join(sorted(candidates))}."
        )
    type(callback)._save_monitor_checkpoint(callback, trainer, candidates)
