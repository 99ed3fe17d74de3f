"""Build, clip and resume the optimizer of a run."""

import logging
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from inspect import isroutine
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
        self._built: list[Settings] = []  # of an optimizer of the user's own
        self._saved: list[Settings] | None = None  # of the run that is resumed, until training begins
        self._is_rescheduled = False  # by another scheduler than that run's
        self._missed: dict[str, float] = {}  # metrics that its schedulers have not seen, likewise

    def note(self, optimizer: Optimizer) -> None:
        """Note the settings of this run's optimizer, before any scheduler moves them."""
        self._check(optimizer)
        self._own = settings_of(optimizer)

    def note_built(self, optimizer: Optimizer) -> None:
        """Note them where a scheduler may have moved them: whoever overrides `configure_optimizers` calls no `note`."""
        self._check(optimizer)
        self._built = [
            {**group, "lr": group["initial_lr"]} if "initial_lr" in group else group for group in settings_of(optimizer)
        ]

    def _check(self, optimizer: Optimizer) -> None:
        """Raise ValueError if the optimizers of checkpoint and run each have settings that the other has not."""
        saved, now = ({*each[0]} - {"initial_lr"} if each else set() for each in (self._saved, settings_of(optimizer)))
        gone, new = sorted(saved - now), sorted(now - saved)
        if gone and new:  # one alone is a setting that a version of torch has added or dropped
            raise ValueError(
                f"The checkpoint's `optimizer` is no {type(optimizer).__name__}: it has {', '.join(gone)} and no "
                f"{', '.join(new)}. Resume with the optimizer of the run that wrote the checkpoint."
            )

    def save(self, checkpoint: dict[str, Any], trainer: L.Trainer) -> None:
        """Write the settings into a checkpoint, and metrics that schedulers follow: Lightning steps them afterwards."""
        checkpoint["optimizer_settings"] = self._saved or self._own or self._built
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
        """Forget what was read by a run that ended before it began to train, and the optimizer of an earlier one."""
        self._saved, self._own, self._missed = None, [], {}

    def apply(self, trainer: L.Trainer, build: LRSchedulerCallable | None) -> None:
        """Apply this run's settings, and its scheduler, made by `build`, once the checkpoint's are restored."""
        if self._saved is None:
            return
        optimizer, configs = trainer.optimizers[0], trainer.lr_scheduler_configs
        schedulers = [] if self._is_rescheduled else [config.scheduler for config in configs]
        apply_changed(optimizer, schedulers, self._saved, self._own or self._built)
        for scheduler in schedulers if self._own else ():
            if isinstance(scheduler, ReduceLROnPlateau) and isroutine(build):  # its settings may have changed
                vars(scheduler).update({n: v for n, v in vars(build(optimizer)).items() if n not in _PLATEAU})
        for config in configs:
            if config.monitor in self._missed and not trainer.current_epoch % config.frequency:
                plateau: Any = config.scheduler
                plateau.step(self._missed[config.monitor])
        if self._is_rescheduled:
            schedule_anew(optimizer, configs, build, self._own, trainer.global_step)
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


def schedule_anew(
    optimizer: Optimizer,
    configs: Sequence[Any],
    build: LRSchedulerCallable | None,
    wanted: Sequence[Settings],
    steps: int,
) -> None:
    """Let settings be what `build`'s scheduler, or none, would have made of them in `steps` optimizer steps.

    Args:
        optimizer: Restored from a checkpoint whose learning rates another scheduler had moved.
        configs: Lightning's, of the scheduler or of none.
        build: Makes the scheduler.
        wanted: `settings_of` this run's optimizer.
        steps: Those that are done. One that follows a metric begins anew.
    """
    if not wanted:
        raise ValueError(
            "The resumed run has another `lr_scheduler`, and `configure_optimizers` is overridden without a call of "
            "`super()`: nobody knows at which learning rates it began. Resume with the scheduler of the checkpoint."
        )
    for group, settings in zip(optimizer.param_groups, wanted, strict=True):
        for name in settings.keys() - {"initial_lr"}:
            _set(group, name, settings[name])  # OneCycleLR moves betas, too
        group.pop("initial_lr", None)
    for config in configs:
        assert build is not None, "a scheduler that nobody builds"
        config.scheduler = build(optimizer)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch misses the optimizer's steps
            for _ in range(steps if config.interval == "step" else 0):
                config.scheduler.step()


def _set(group: dict[str, Any], name: str, value: Any) -> None:
    kept = group[name]
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
