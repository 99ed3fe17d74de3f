"""Build, clip and resume the optimizer of a run."""

import logging
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import lightning as L
import torch
from lightning.pytorch.cli import LRSchedulerCallable
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from tlt_lightning.arguments import check_argument
from tlt_lightning.training.followed_metrics import check_followed, validates_by_iteration
from tlt_lightning.training.lr_schedule import with_schedule
from tlt_lightning.training.resume import drop_schedule

log = logging.getLogger(__name__)

_PLATEAU = ("best", "cooldown_counter", "last_epoch", "num_bad_epochs", "_last_lr")
"""Names what a scheduler that follows a metric has seen; its other attributes are settings."""

Settings = dict[str, Any]
"""Settings of one parameter group of an optimizer, by name."""


def built(build: Callable[[Any], Optimizer], groups: list[dict[str, Any]]) -> Optimizer:
    """Return the optimizer that `build` makes.

    Raises:
        TypeError: It is none.
        ValueError: It moves none of the given parameters.
    """
    optimizer = build(groups)
    check_argument("optimizer(parameters)", optimizer, Optimizer)
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if held.isdisjoint(id(parameter) for group in groups for parameter in group["params"]):
        raise ValueError(
            "`optimizer` builds one that holds none of the parameters it is given, and nothing would be trained: pass "
            "them on, as `lambda parameters: AdamW(parameters, lr=1e-6)` does."
        )
    return optimizer


class ResumedOptimizer:
    """Lets a run that is resumed have its own optimizer settings and scheduler, not its checkpoint's."""

    def __init__(self) -> None:
        self._own: list[Settings] = []
        self._of_schedulers: list[Settings] = []
        self._saved: list[Settings] | None = None  # of the run that is resumed, until training begins
        self._is_rescheduled = False  # by another scheduler than that run's
        self._missed: dict[str, float] = {}  # metrics that its schedulers have not seen, likewise

    def note(self, trainer: L.Trainer) -> None:
        """Note the settings of this run's optimizer and schedulers in `on_fit_start`: a checkpoint's come later.

        Raises:
            ValueError: The optimizers of checkpoint and run each have settings that the other has not.
        """
        self._own = settings_of(trainer.optimizers[0])
        self._of_schedulers = [{**vars(config.scheduler)} for config in trainer.lr_scheduler_configs]
        saved, now = ({*each[0]} - {"initial_lr"} if each else set() for each in (self._saved, self._own))
        gone, new = sorted(saved - now), sorted(now - saved)
        if gone and new:  # one alone is a setting that a version of torch has added or dropped
            raise ValueError(
                f"The checkpoint's `optimizer` is no {type(trainer.optimizers[0]).__name__}: it has {', '.join(gone)} "
                f"and no {', '.join(new)}. Resume with the optimizer of the run that wrote the checkpoint."
            )

    def save(self, checkpoint: dict[str, Any], trainer: L.Trainer) -> None:
        """Write the settings into a checkpoint, and metrics that schedulers follow: Lightning steps them afterwards."""
        checkpoint["optimizer_settings"] = self._saved or _unmoved(self._own)
        checkpoint["missed"], epochs = dict(self._missed), vars(trainer.fit_loop.epoch_progress.current)
        for config in trainer.lr_scheduler_configs if epochs["processed"] > epochs["completed"] else ():
            if config.monitor in trainer.callback_metrics:
                checkpoint["missed"][config.monitor] = float(trainer.callback_metrics[config.monitor])

    def load(self, checkpoint: dict[str, Any], build: LRSchedulerCallable | None, *, is_another: bool) -> None:
        """Read what `save` wrote, and drop the scheduler's state as `drop_schedule` does."""
        self._is_rescheduled = drop_schedule(checkpoint, build, is_another=is_another)
        self._saved = checkpoint["optimizer_settings"]
        self._missed = {} if self._is_rescheduled else checkpoint.get("missed", {})

    def forget(self) -> None:
        """Forget what was read by a run that ended before it began to train."""
        self._saved, self._missed = None, {}

    def apply(self, trainer: L.Trainer) -> None:
        """Apply this run's settings, and its schedulers, once the checkpoint's are restored."""
        if self._saved is None:
            return
        configs = trainer.lr_scheduler_configs
        schedulers = [] if self._is_rescheduled else [config.scheduler for config in configs]
        apply_changed(trainer.optimizers[0], schedulers, self._saved, _unmoved(self._own))
        for scheduler, own in zip(schedulers, self._of_schedulers, strict=False):
            if isinstance(scheduler, ReduceLROnPlateau):
                vars(scheduler).update({name: value for name, value in own.items() if name not in _PLATEAU})
        for config in configs:
            if config.monitor in self._missed and not trainer.current_epoch % config.frequency:
                plateau: Any = config.scheduler
                plateau.step(self._missed[config.monitor])
        if self._is_rescheduled:
            schedule_anew(trainer, self._own)
        self._saved, self._missed = None, {}


def check_optimization(trainer: L.Trainer) -> None:
    """Raise an error for an optimizer or a scheduler of `RLModule` that cannot be built or could not move it.

    Both are built for small parameters.
    """
    module: Any = trainer.lightning_module
    shapes = ((2, 2), (2,))  # some move matrices alone
    critic = module.critic_config
    groups = [{"params": [torch.zeros(shape, requires_grad=True) for shape in shapes]} for _ in range(2)]
    optimizer = built(module.optimizer, groups[:1] if critic is None else [groups[0], groups[1] | {"lr": critic.lr}])
    _, configs = made if isinstance(made := with_schedule(optimizer, module.lr_scheduler), tuple) else (made, [])
    for config in configs:
        scheduler = config["scheduler"]
        if "monitor" in config:
            who = f"lr_scheduler {type(scheduler).__name__}(monitor={config['monitor']!r})"
            check_followed(trainer, who, config["monitor"], scheduler.mode)
            if config["monitor"].startswith("val/") and not validates_by_iteration(trainer):
                raise MisconfigurationException(
                    f"`{who}` looks at the ends of iterations, and this run validates elsewhere: leave "
                    "`val_check_interval` out, and set `Trainer(check_val_every_n_epoch=1)`."
                )


def schedule_anew(trainer: L.Trainer, began: Sequence[Settings]) -> None:
    """Let settings be what the run's schedulers, or none, would have made of them in the steps that are done.

    Args:
        trainer: Of a run that is resumed: its optimizer is restored from a checkpoint whose learning rates another
            scheduler had moved, its schedulers are as they were built. One that follows a metric begins anew.
        began: `settings_of` its optimizer before that.
    """
    for group, settings in zip(trainer.optimizers[0].param_groups, began, strict=True):
        group.pop("initial_lr", None)
        for name, value in settings.items():
            _set(group, name, value)  # OneCycleLR moves betas, too
    for config in trainer.lr_scheduler_configs:
        scheduler: Any = config.scheduler
        num_done = trainer.global_step if config.interval == "step" else trainer.current_epoch
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch misses the optimizer's steps
            for _ in range(0 if config.reduce_on_plateau else num_done // config.frequency):
                scheduler.step()


def _unmoved(settings: Sequence[Settings]) -> list[Settings]:
    """Return settings of groups with the learning rates that they had before any scheduler moved them."""
    return [{**group, "lr": group["initial_lr"]} if "initial_lr" in group else group for group in settings]


def _set(group: dict[str, Any], name: str, value: Any) -> None:
    kept = group.get(name)
    group[name] = kept.fill_(value) if isinstance(kept, Tensor) else value


def let_step_on_cpu(optimizer: Optimizer) -> None:
    """Let an optimizer whose steps CUDA graphs may capture be tried on the CPU, where it would refuse."""
    for group in optimizer.param_groups:
        if "capturable" in group:
            group["capturable"] = False


def fuse_on_gpu(optimizer: Optimizer, device: torch.device) -> None:
    """Fuse Adam on a GPU alone, for results are rounded otherwise; a checkpoint that is loaded may undo it."""
    if device.type == "cuda":
        fuse_adam(optimizer, device)


def fuse_adam(optimizer: Optimizer, device: torch.device) -> None:
    """Let Adam read and write weights and state once a step, unless its settings say how.

    Its state stays the same, so that each reads the other's checkpoints. Its constructor is not told, for PyTorch would
    leave the unscaling of gradients to it, too.

    Args:
        optimizer: Any; all but Adam and AdamW stay as they are.
        device: Where it runs.
    """
    if not isinstance(optimizer, torch.optim.Adam):
        return
    for group in optimizer.param_groups:
        if group["fused"] is None and group["foreach"] is None:
            group["fused"] = True
        if group["fused"]:
            for parameter in group["params"]:
                if state := optimizer.state.get(parameter):
                    state["step"] = state["step"].to(device)  # else it is counted on the host


def clip_networks(optimizer: Optimizer, critic: nn.Module | None, value: float, algorithm: str | None) -> None:
    """Clip the policy's gradient by its norm over all groups, the critic's by its own: it must not shrink the other."""
    clip = nn.utils.clip_grad_value_ if algorithm == "value" else nn.utils.clip_grad_norm_
    of_critic = set() if critic is None else {id(parameter) for parameter in critic.parameters()}
    parameters = [each for group in optimizer.param_groups for each in group["params"] if each.grad is not None]
    for is_critic in (False, True):
        if own := [parameter for parameter in parameters if (id(parameter) in of_critic) is is_critic]:
            clip(own, value)


def backward_alone(trainer: L.Trainer, loss: Tensor) -> None:
    """Add a loss's gradient to those of this rank; the step's last backward pass sends all of them to the others."""
    strategy = trainer.strategy
    alone = strategy.block_backward_sync() if isinstance(strategy, ParallelStrategy) else nullcontext()
    with alone, torch.autocast(loss.device.type, enabled=False):  # which is around forward passes alone
        strategy.backward(loss, None)


def settings_of(optimizer: Optimizer) -> list[Settings]:
    """Return the primitive settings of an optimizer's groups: rates, also those kept as tensors, betas, decay, ..."""
    kinds = bool | int | float | str | tuple | list | None
    return [
        {name: _plain(value) for name, value in group.items() if name != "params" and isinstance(_plain(value), kinds)}
        for group in optimizer.param_groups
    ]


def _plain(value: Any) -> Any:
    """Return a tensor of one number, as 8-bit optimizers keep a rate, as that number; all else as it is."""
    return float(f"{value.item():.7g}") if isinstance(value, Tensor) and not value.dim() else value


def apply_changed(
    optimizer: Optimizer,
    schedulers: Sequence[Any],
    saved: Sequence[Settings],
    wanted: Sequence[Settings],
    name_in_warnings: str = "optimizer",
) -> None:
    """Apply settings that have changed since the checkpoint, which has overwritten them.

    A learning rate under a scheduler changes in proportion.

    Args:
        optimizer: Restored from the checkpoint.
        schedulers: The schedulers of its learning rates, restored as well.
        saved: `settings_of` the optimizer of the run that is resumed, when it was made.
        wanted: `settings_of` this run's.
        name_in_warnings: How a warning of each change calls the optimizer.
    """
    for number, (group, old, new) in enumerate(zip(optimizer.param_groups, saved, wanted, strict=False)):
        for name in sorted(new.keys() & old.keys()):
            if new[name] == old[name] or name == "initial_lr":
                continue
            values = name, name_in_warnings, new[name], old[name]
            log.warning("Resumed with another `%s` of the %s: %s instead of %s.", *values)
            if name != "lr" or not schedulers or not old["lr"]:
                _set(group, name, new[name])
                continue
            factor = new["lr"] / old["lr"]
            group["lr"] *= factor
            if "initial_lr" in group:
                group["initial_lr"] *= factor
            for scheduler in schedulers:
                if hasattr(scheduler, "base_lrs"):
                    scheduler.base_lrs[number] *= factor
