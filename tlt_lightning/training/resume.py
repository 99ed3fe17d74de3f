"""Resume a run that was saved within an iteration, or whose settings have changed since."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import lightning as L
from typing_extensions import override

from tlt_lightning.policy import LoRA

log = logging.getLogger(__name__)

PROMPTS = "checksum of the training prompts"
"""Setting of a checkpoint by which a resumed run knows whether prompts have the numbers that they had."""

_CHOICES = {"model": ("objective", "reference"), "data": ("rewards", "sampling", "schedule", "dynamic_sampling")}
"""Arguments of module and data module that decide what is written and what is learned from it."""

_OTHERWISE = "The resumed run goes on otherwise than the one that wrote the checkpoint: %s."

_COUNTS = ("ready", "started", "processed", "completed")


@dataclass
class UpdateState:
    """Holds the state of an iteration's update beside weights and optimizer.

    Args:
        first_step: Optimizer steps before the iteration.
        is_stopped: The policy has moved by `objective.stop_at_kl`, and moves no more in this iteration.
        validated: Metrics of the iteration's last validation.
    """

    first_step: int = 0
    is_stopped: bool = False
    validated: dict[str, float] = field(default_factory=dict)


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


def hand_over(trainer: L.Trainer, state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what a checkpoint needs, as primitives, to resume within an iteration; then what each rank needs there.

    The latter is empty between iterations. `state` has the update, the optimizer's settings, the iteration's log and
    texts: those of now, or what was saved of them while a resumed run has not begun.
    """
    needed = {name: state[name] for name in ("update", "optimizer")} | {"num_batches": trainer.num_training_batches}
    if not is_within(vars(trainer.fit_loop.epoch_progress.current)):
        return needed, {}
    return needed, {name: state.get(name) for name in ("log", "texts")}


def is_within(epochs: Mapping[str, int]) -> bool:
    """Return True if, by the progress of epochs, an iteration has begun and not ended."""
    return epochs["ready"] != epochs["processed"]


def held_by(checkpoint: Mapping[str, Any]) -> str:
    """Say in words which iterations a checkpoint holds."""
    epochs = checkpoint["loops"]["fit_loop"]["epoch_progress"]["current"]
    text = f"{epochs['processed']} iteration{'s' * (epochs['processed'] != 1)}"
    saved = checkpoint.get("iteration")
    if saved is None or not is_within(epochs):
        return text
    num_steps = checkpoint["global_step"] - saved["update"]["first_step"]
    return f"{text} and {num_steps} of {saved['num_batches']} optimizer steps of the next" if num_steps else text


def take_up(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Return what `RLModule` has saved; of a checkpoint within an iteration, rewind the Trainer's loops.

    The loops go on behind the last optimizer step that was taken, whatever Lightning has counted of one under way.
    Before the first step the iteration begins anew. In what is returned `is_within` says whether the update has begun,
    and `is_updated` whether it is over. Raise ValueError for a checkpoint of weights alone.
    """
    if "optimizer_states" not in checkpoint:
        raise ValueError(
            "`ckpt_path` holds weights alone, as `save_weights_only=True` leaves them, and no run goes on without its "
            "optimizer: resume from a whole checkpoint, or begin a run with the folder that `export --ckpt_path` "
            "writes as `model.policy`."
        )
    saved: dict[str, Any] = {**checkpoint["iteration"], "is_within": False}
    epochs = checkpoint["loops"]["fit_loop"]["epoch_progress"]["current"]
    if is_within(epochs):
        num_steps = checkpoint["global_step"] - saved["update"]["first_step"]  # each of one batch
        is_updated = num_steps == saved["num_batches"]
        _rewind(checkpoint["loops"]["fit_loop"], num_steps, is_last=is_updated)
        saved |= {"is_within": num_steps > 0, "is_updated": is_updated}
        if is_updated and not saved["update"]["validated"]:  # it was due
            _begin_validation(checkpoint["loops"]["fit_loop"])
    return saved


def restart_validation(checkpoint: dict[str, Any]) -> None:
    """Make a validation that a checkpoint was saved within begin anew; Lightning would go on behind its last batch."""
    loops = checkpoint.get("loops", {}).get("fit_loop")
    if loops is not None:
        total = loops["epoch_loop.val_loop.batch_progress"]["total"]
        if total["ready"] != total["processed"]:
            _begin_validation(loops)


def _begin_validation(loops: dict[str, Any]) -> None:
    """Count a validation as begun, for Lightning takes one that has not for done."""
    progress = loops["epoch_loop.val_loop.batch_progress"]
    progress["current"].update(dict.fromkeys(_COUNTS, 0))
    progress["total"].update(ready=1, started=1, processed=0, completed=0)


def _rewind(loops: dict[str, Any], num_batches: int, *, is_last: bool) -> None:
    batches = loops["epoch_loop.batch_progress"]
    for name in _COUNTS:
        batches["total"][name] += num_batches - batches["current"][name]
        batches["current"][name] = num_batches
    batches["is_last_batch"] = is_last
    if num_batches == 0:
        for progress in loops["epoch_progress"].values():
            progress.update(dict.fromkeys(_COUNTS, progress["processed"]))


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
        raise ValueError(f"The checkpoint was written with `lora` {was}, this run has {lora}; make them equal.")
    shapes = {name: (getattr(saved[name], "shape", None), now[name].shape) for name in saved.keys() & now.keys()}
    differing = {name for name, (before, after) in shapes.items() if before is not None and before != after}
    differing |= saved.keys() ^ now.keys()
    if differing:
        raise ValueError(
            f"`ckpt_path` holds other networks than `policy` and `objective` ask for: {len(differing)} tensors differ "
            f"in name or shape, among them {min(differing)!r}. Resume with those of the run that wrote it, of policy "
            f"{policy['path']!r}."
        )


def check_update(saved: Mapping[str, Any], now: Mapping[str, Any], num_ranks: int) -> None:
    """Raise ValueError if an update that was saved halfway is not all there, or a changed setting splits it otherwise.

    `num_ranks` is the number of workers whose states were saved: after an error, one alone.
    """
    if num_ranks < saved["number of workers"]:
        raise ValueError(
            f"`ckpt_path` was saved after an error, within an iteration's update, by {num_ranks} of "
            f"{saved['number of workers']} workers; the others' are lost. Resume from an earlier one."
        )
    if changes := _changes(saved, now):
        raise ValueError(
            f"`ckpt_path` was saved within an iteration's update, which these settings split otherwise: {changes}. "
            "Set them back until that iteration is over, or resume from a checkpoint of an iteration's end."
        )


def warn_of_changes(saved: Mapping[str, Any], now: Mapping[str, Any], ranks: Sequence[Mapping[str, Any]]) -> None:
    """Warn of each changed setting, and of workers without a saved state, that make the resumed run go on otherwise.

    `ranks` are the states of the workers.
    """
    if len(ranks) < saved["number of workers"]:
        log.warning(
            "The checkpoint was saved after an error, by %d of %d workers: what a schedule had deferred on the "
            "others is lost, and its prompts are not drawn again in this pass over the data.",
            len(ranks),
            saved["number of workers"],
        )
    num_deferred = sum(len(state["deferred"]) for state in ranks)
    if num_deferred and saved[PROMPTS] != now[PROMPTS]:
        log.warning(
            "%d prompts that a schedule had deferred are dropped, for the training prompts are others.", num_deferred
        )
    if changes := _changes(saved, now):
        log.warning(_OTHERWISE, changes)


def warn_of_choices(checkpoint: Mapping[str, Any], module: L.LightningModule, data: L.LightningDataModule) -> None:
    """Warn of each changed choice of objective, rewards, sampling and schedule, by the descriptions in a checkpoint.

    A checkpoint without descriptions warns of nothing.
    """
    changes = [
        change
        for room, part in (("model", module), ("data", data))
        for name in _CHOICES[room]
        if name in (saved := checkpoint.get(part.CHECKPOINT_HYPER_PARAMS_KEY, {}))
        for change in _differences(f"{room}.{name}", saved[name], part.hparams[name])
    ]
    if changes:
        log.warning(_OTHERWISE, "; ".join(changes))


def _differences(name: str, before: Any, now: Any) -> list[str]:
    """Name what differs between two descriptions; an argument that only one of them has is passed over."""
    if isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        before, now = dict(enumerate(before)), dict(enumerate(now))
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        return [each for key in now if key in before for each in _differences(f"{name}.{key}", before[key], now[key])]
    return [] if before == now else [f"{name} was {before} and is {now}"]


def _changes(saved: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    return "; ".join(change for name in now for change in _differences(name, saved[name], now[name]))


class Requeue(L.Callback):
    """Holds SLURM's requeue back where nothing is whole: amid an optimizer step, and while a resumed run begins."""

    def __init__(self) -> None:
        self._is_busy = True
        self._waiting: Callable[[], None] | None = None

    def handle(self, save: Callable[[Any, Any], None], signum: Any, frame: Any) -> None:
        """Let Lightning's handler save, now or behind the step under way."""
        if self._is_busy:
            self._waiting = lambda: save(signum, frame)
        else:
            save(signum, frame)

    def on_rollout_start(self, trainer: L.Trainer, *_: Any) -> None:
        """Let a requeue save from the run's first rollout on; a run resumed within an update begins with a step."""
        self._let_save()

    @override
    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        self._is_busy = True

    @override
    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self._let_save()

    def _let_save(self) -> None:
        self._is_busy = False
        if self._waiting is not None:
            waiting, self._waiting = self._waiting, None
            waiting()
