"""Close an iteration's log before any callback looks for its metrics."""

import logging
from collections.abc import Mapping
from math import isfinite
from typing import Any

import lightning as L
import torch
from typing_extensions import override

from tlt_lightning.engine.base import RolloutEngine
from tlt_lightning.engine.probe import warn_of_mismatch, warn_of_surprise
from tlt_lightning.objectives.correction import effective_sample_size
from tlt_lightning.sharding.units import total_norm
from tlt_lightning.training.throughput import peak_flops, utilisation

log = logging.getLogger(__name__)

LEAST_SAMPLE_SIZE = 0.1
"""Share of tokens below which a rollout teaches next to nothing; 16 bit leaves 0.999, 8 bit some 0.99."""


class CloseIteration(L.Callback):
    """Closes the log before other callbacks' `on_train_epoch_end`, which then find its metrics."""

    is_at_sound_end = False
    """True from where an iteration's policy was found whole until the next iteration begins."""

    def _begin(self, *_: Any, **__: Any) -> None:
        self.is_at_sound_end = False

    setup = on_train_epoch_start = _begin  # the former after an earlier run

    @override
    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        if not hasattr(pl_module, "iteration_log"):
            return
        if pl_module.device.type == "cuda":
            torch.cuda.synchronize(pl_module.device)
        pl_module.iteration_log.lap("update")
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        engine: RolloutEngine | None = data.engine
        pl_module.iteration_metrics = metrics = pl_module.iteration_log.close(
            trainer, None if engine is None else engine.take_laps()
        )
        metrics |= utilisation(metrics, trainer.world_size, peak_flops(pl_module.device))
        check_policy_is_whole(pl_module, metrics)
        # Tokens of older weights differ, as they should, and so do all where every step is compared with the text.
        if engine is not None and not (
            metrics.get("schedule/age")
            or pl_module.objective.clips_behaviour(asynchronous=data.backlog.schedule.is_asynchronous)
        ):
            warn_of_mismatch(metrics.get("mismatch/kl", 0.0), trainer.current_epoch + 1, engine.compute_dtype)
        warn_of_surprise(metrics, trainer.current_epoch + 1)
        judge_weights(metrics, trainer.current_epoch + 1)
        self.is_at_sound_end = True
        log_of_iteration(pl_module, metrics)


def judge_weights(metrics: dict[str, float], iteration: int) -> None:
    """Put `mismatch/effective_sample_size` in the place of the mean square; raise RuntimeError if it is too small."""
    share = effective_sample_size(metrics)
    metrics.pop("mismatch/is_weight_square", None)
    if share is None:
        return
    metrics["mismatch/effective_sample_size"] = share
    if share < LEAST_SAMPLE_SIZE:
        raise RuntimeError(
            f"Iteration {iteration}: the weights that correct for the mismatch of engine and trainer leave an "
            f"effective sample of {share:.2g} of the tokens (`mismatch/effective_sample_size`), and at least "
            f"{LEAST_SAMPLE_SIZE} must be left to learn from. Keep more of the engine's layers in 16 bit "
            "(`quantization.layers_in_16_bit`, or `quantization: null`), lower the schedule's `max_policy_lag` or "
            '`max_staleness`, or correct with `level: token` where it is "sequence".'
        )


def log_of_iteration(module: L.LightningModule, metrics: Mapping[str, float]) -> None:
    """Log over iterations, not micro-batches as Lightning would, before a checkpoint is written."""
    module.log_dict(dict(metrics), logger=False)
    for logger in module.trainer.loggers:
        logger.log_metrics(dict(metrics), step=module.current_epoch)
        logger.save()


def check_policy_is_whole(module: L.LightningModule, metrics: Mapping[str, float]) -> None:
    """Raise RuntimeError if an update has broken the policy, before a checkpoint holds it.

    Loss and gradient are known before a step, so what the last step left shows in the weights alone.
    """
    norms = {name: metrics.get(name, 0.0) for name in ("train/loss", "train/grad_norm")}
    norms["norm of the weights"] = float(total_norm([p.detach() for p in module.parameters()]))
    for name, value in norms.items():
        if not isfinite(value):
            raise RuntimeError(
                f"`{name}` is {value} in iteration {module.current_epoch + 1}: the update has broken the policy. "
                "Lower the learning rate or clip gradients (`trainer.gradient_clip_val`), and resume from the last "
                "checkpoint, which is older, or begin anew."
            )
