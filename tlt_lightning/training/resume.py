"""Resume a run, also one that was saved while an iteration was written or whose settings have changed since."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import fields
from inspect import isroutine
from typing import Any

import lightning as L
import torch
from typing_extensions import override

from tlt_lightning.adapters import LoRA

log = logging.getLogger(__name__)

PROMPTS = "checksum of the training prompts"
"""Setting of a checkpoint by which a resumed run knows whether prompts have the numbers that they had."""

_CHOICES = {
    "model": ("objective", "reference", "lr_scheduler", "critic"),
    "data": ("rewards", "environment", "turns", "sampling", "schedule", "dynamic_sampling", "val"),
}
"""Arguments of module and data module that decide what is written, what is learned from it and what judges it."""

_COUNTS = ("ready", "started", "processed", "completed")


def begins_run(trainer: L.Trainer) -> bool:
    """Return True in `setup` if this `fit` does not go on from the Trainer's last; a checkpoint's state comes later."""
    return trainer.state.fn == "fit" and not trainer.global_step


def forget_unfinished(trainer: L.Trainer) -> None:
    """Let a `fit` begin the iteration anew within which an exception has ended the Trainer's last.

    Lightning goes on counting it as begun, and checkpoints of later iterations would look like saved within one.
    """
    loop = trainer.fit_loop
    for progress in (loop.epoch_progress, loop.epoch_loop.val_loop.batch_progress):
        for counts in (progress.current, progress.total):
            vars(counts).update(dict.fromkeys(_COUNTS, vars(counts)["processed"]))


def is_within(epochs: Mapping[str, int]) -> bool:
    """Return True if, by the progress of epochs, an iteration has begun and not ended."""
    return epochs["ready"] != epochs["processed"]


def iterations_of(path: str) -> int | None:
    """Return the iterations that a checkpoint holds; None if it cannot be read."""
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        return checkpoint["loops"]["fit_loop"]["epoch_progress"]["current"]["processed"]
    except Exception as error:  # of a plugin of the user's, in any form
        log.info("%s tells nobody which iterations it holds: %s", path, error)
        return None


def has_begun_update(trainer: L.Trainer) -> bool:
    """Return True from an iteration's first optimizer step to its end: weights have moved, and it is not done.

    The warm-up of a drafter has no iterations, and resumes from any step.
    """
    loop, has_iterations = trainer.fit_loop, hasattr(trainer.lightning_module, "iteration_log")
    return (
        has_iterations
        and is_within(vars(loop.epoch_progress.current))
        and vars(loop.epoch_loop.batch_progress.current)["started"] > 0
    )


def rewind(checkpoint: dict[str, Any]) -> None:
    """Rewind a checkpoint to the end of its last iteration: one that had only begun begins anew.

    Raises:
        ValueError: It holds weights alone, or those of an update that is not done.
    """
    if "optimizer_states" not in checkpoint:
        raise ValueError(
            "`ckpt_path` holds weights alone, as `save_weights_only=True` leaves them, and no run goes on without its "
            "optimizer: resume from a whole checkpoint, or begin a run with the folder that `export --ckpt_path` "
            "writes as `model.policy`."
        )
    loops = checkpoint["loops"]["fit_loop"]
    batches = loops["epoch_loop.batch_progress"]
    if not is_within(loops["epoch_progress"]["current"]):
        return
    if batches["current"]["started"]:
        raise ValueError(
            "`ckpt_path` was saved amid an iteration's update, from where no run goes on exactly: resume from one that "
            "was saved at an iteration's end, as `IterationCheckpoint` writes them."
        )
    for name in _COUNTS:
        batches["total"][name] -= batches["current"][name]
        batches["current"][name] = 0
    for progress in loops["epoch_progress"].values():
        progress.update(dict.fromkeys(_COUNTS, progress["processed"]))


def restart_validation(checkpoint: dict[str, Any]) -> None:
    """Make a validation that a warm-up was saved within begin anew; Lightning would go on behind its last batch."""
    loops = checkpoint.get("loops", {}).get("fit_loop")
    if loops is not None:
        progress = loops["epoch_loop.val_loop.batch_progress"]
        if progress["total"]["ready"] != progress["total"]["processed"]:
            progress["current"].update(dict.fromkeys(_COUNTS, 0))
            progress["total"].update(ready=1, started=1, processed=0, completed=0)  # not begun would count as done


def check_networks(checkpoint: Mapping[str, Any], lora: LoRA | None, now: Mapping[str, Any]) -> None:
    """Raise ValueError unless the checkpoint's adapters are `lora`, and its tensors have the names and shapes of `now`.

    The rows of a sharded tensor have no shape.
    """
    if "policy" not in checkpoint:
        raise ValueError(
            "`ckpt_path` is a checkpoint of another LightningModule than an RLModule, for example of `drafter fit`: "
            "give one that `fit` wrote. A model to begin with is `model.policy`, and a draft head `speculation.head`."
        )
    policy, saved = checkpoint["policy"], checkpoint["state_dict"]
    was = None if policy["lora"] is None else LoRA(**{item.name: policy["lora"][item.name] for item in fields(LoRA)})
    if was != lora:
        raise ValueError(
            f"The checkpoint was written with `lora` {was}, this run has {lora}; make them equal, or begin a run with "
            "the `policy` that `export` writes of it."
        )
    shapes = {name: (getattr(saved[name], "shape", None), now[name].shape) for name in saved.keys() & now.keys()}
    differing = {name for name, (before, after) in shapes.items() if before is not None and before != after}
    differing |= saved.keys() ^ now.keys()
    if differing:
        raise ValueError(
            f"`ckpt_path` holds other networks than `policy` and `objective` ask for: {len(differing)} tensors differ "
            f"in name or shape, among them {min(differing)!r}. Resume with those of the run that wrote it, of policy "
            f"{policy['path']!r}."
        )


def warn_of_changes(saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Warn of each changed setting that makes the resumed run go on otherwise."""
    if changes := [each for name in now for each in _differences(name, saved[name], now[name])]:
        log.warning("The resumed run goes on otherwise than the one that wrote the checkpoint: %s.", "; ".join(changes))


def warn_of_choices(checkpoint: Mapping[str, Any], module: L.LightningModule, data: L.LightningDataModule) -> bool:
    """Warn of each changed choice of what is written and learned, by the descriptions in a checkpoint.

    A checkpoint without descriptions warns of nothing.

    Returns:
        True if the learning rate has another scheduler.
    """
    saved: dict[str, Any] = {}
    now: dict[str, Any] = {}
    for room, part in (("model", module), ("data", data)):
        was = checkpoint.get(part.CHECKPOINT_HYPER_PARAMS_KEY, {})
        for name in _CHOICES[room]:
            if name in was and name in part.hparams:
                saved[f"{room}.{name}"], now[f"{room}.{name}"] = was[name], part.hparams[name]
    warn_of_changes(saved, now)
    return saved.get("model.lr_scheduler") != now.get("model.lr_scheduler")


def drop_schedule(checkpoint: dict[str, Any], build: Any, *, is_another: bool) -> bool:
    """Drop the state of the learning rates' scheduler from a checkpoint if it is another's, or may be.

    Args:
        checkpoint: The checkpoint of a run that is resumed.
        build: Builds the scheduler. A function's name does not tell what it builds, which may have changed.
        is_another: The scheduler is known to have changed; it loses also the state of one that follows a metric.

    Returns:
        True if there is no state any more, and the scheduler is to be stepped anew.
    """
    follows_metric = any("num_bad_epochs" in each for each in checkpoint.get("lr_schedulers", ()))
    is_dropped = is_another or (isroutine(build) and not follows_metric)
    if is_dropped:
        checkpoint["lr_schedulers"] = []
    return is_dropped


def _differences(name: str, before: Any, now: Any) -> list[str]:
    """Name what differs between two descriptions; an argument that only one of them has is passed over."""
    if isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        before, now = dict(enumerate(before)), dict(enumerate(now))
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        return [each for key in now if key in before for each in _differences(f"{name}.{key}", before[key], now[key])]
    return [] if before == now else [f"{name} was {before} and is {now}"]


class Requeue(L.Callback):
    """Holds SLURM's requeue back until an iteration begins: amid an update and while a run resumes, all is half.

    Ranks save together. So one that has written its responses, and may wait for others in a collective, saves where
    all come by.
    """

    def __init__(self) -> None:
        self._is_busy = True
        self._waiting: Callable[[], None] | None = None
        self._idle: Any = None  # the run's `IdleWindows`
        self._num_closed = 0

    def handle(self, save: Callable[[], None]) -> None:
        """Let Lightning's handler save, now or where all ranks may."""
        self._waiting = save
        if not self._is_busy and (self._idle is None or self._idle.num_closed == self._num_closed):
            self._save()

    def on_rollout_start(self, trainer: L.Trainer, *_: Any) -> None:
        """Let a requeue save until this rank's last window closes, or its first optimizer step."""
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        if trainer.sanity_checking or has_begun_update(trainer) or data.engine.num_ranks > 1:
            return  # it is being validated, or its ranks meet in each engine step
        self._idle = data.idle
        self._is_busy, self._num_closed = False, 0 if self._idle is None else self._idle.num_closed
        self._save()

    def _save(self) -> None:
        if self._waiting is not None:
            waiting, self._waiting = self._waiting, None
            waiting()

    @override
    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        is_first = hasattr(pl_module, "iteration_log") and not batch_idx
        if is_first and trainer.strategy.reduce_boolean_decision(self._waiting is not None):
            self._save()
        self._is_busy = True
