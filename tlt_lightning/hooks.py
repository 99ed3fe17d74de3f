"""Declare the rollout's hooks for callbacks, and call them.

Any callback with one of these methods gets its calls; deriving from `RolloutCallback` is not required. Hooks run on
every rank, on the main thread, between engine steps.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from types import CodeType
from typing import Any

import lightning as L
from lightning.pytorch.core.optimizer import _configure_optimizers
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from tlt_lightning.arguments import check_method
from tlt_lightning.engine.base import RolloutEngine, RolloutProgress
from tlt_lightning.hidden_states import PolicyText
from tlt_lightning.policy import load_shapes
from tlt_lightning.ranks.idle_windows import IdleWindow
from tlt_lightning.rollout import Rollout, RolloutBatch


class RolloutCallback(L.Callback):
    """Sees the rollout as a Lightning callback; override what you need.

    Put numbers of your own into `pl_module.iteration_log` by `mean`, `max` or `sum`, which say how the values of the
    iteration and of all ranks become one; each is logged once an iteration.

    Example:
        >>> class LongestResponse(RolloutCallback):
        ...     def on_rollout_end(self, trainer, pl_module, rollouts):
        ...         if trainer.training:
        ...             longest = max(len(rollout.response.token_ids) for rollout in rollouts)
        ...             pl_module.iteration_log.max("rollout/longest", longest)
    """

    def on_engine_setup(self, trainer: L.Trainer, pl_module: L.LightningModule, engine: RolloutEngine) -> None:
        """Change the engine's arguments on every rank, before the engine is loaded."""

    def on_rollout_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Act once an iteration, when the engine has the current weights and is about to write."""

    def on_rollout_progress(self, trainer: L.Trainer, pl_module: L.LightningModule, progress: RolloutProgress) -> None:
        """Act after each engine step; return fast, the engine waits."""

    def on_rollout_idle(self, trainer: L.Trainer, pl_module: L.LightningModule, window: IdleWindow) -> None:
        """Use the time of a worker that is done; return as soon as `window.is_open()` is False."""

    def on_rollout_end(self, trainer: L.Trainer, pl_module: L.LightningModule, rollouts: Sequence[Rollout]) -> None:
        """Read this rank's rollouts and rewards, in training, validation and prediction.

        A `reward` that is changed here is learned from, within `trainer.training`; which rollouts there are is settled.
        """

    def on_rollout_scored(self, trainer: L.Trainer, pl_module: L.LightningModule, batch: RolloutBatch) -> None:
        """Read this rank's whole batch in training, advantages and log-probs filled in.

        `old_logps` is None where the iteration takes one optimizer step and nothing asks for them before it.
        """

    def on_hidden_states(self, trainer: L.Trainer, pl_module: L.LightningModule, texts: Sequence[PolicyText]) -> None:
        """Read the texts that `pl_module.hidden_state_request` asked for, states from before the update.

        It is None until a callback sets it, in `on_rollout_start` at the latest, to a `HiddenStateRequest`; nothing
        calls this hook before.
        """

    def on_weights_synced(self, trainer: L.Trainer, pl_module: L.LightningModule, version: int) -> None:
        """Act when the engine has the policy's weights; `version` counts optimizer steps."""

    def on_iteration_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, iteration: int, metrics: dict[str, float]
    ) -> None:
        """Act when an iteration is over and logged, before a checkpoint of it is written.

        Set `trainer.should_stop` here to end the run; with several ranks all of them must.

        Args:
            trainer: The Trainer.
            pl_module: The `RLModule`.
            iteration: Finished iterations, this one included; counts on over a resume.
            metrics: All of `iteration_log`, over all ranks, and the accuracies of a validation in this iteration.
        """


ROLLOUT_HOOKS = tuple(name for name in vars(RolloutCallback) if name.startswith("on_"))
HOOK_PREFIXES = ("on_rollout", "on_iteration", "on_weight", "on_hidden", "on_engine")
KEPT = {
    *("setup", "configure_callbacks", "configure_model", "optimizer_zero_grad"),
    *("teardown", "state_dict", "load_state_dict", "train_dataloader", "transfer_batch_to_device"),
}
"""Methods beside those named `on_...` that a run needs of a module or data module of this package."""


def call_rollout_hook(trainer: L.Trainer, name: str, *args: Any) -> None:
    """Call hook `name` of every callback that has it, with the Trainer and its module.

    Raise TypeError if one returns anything: somebody expects it to be read.
    """
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        hook, label = getattr(callback, name, None), f"`{type(callback).__name__}.{name}`"
        if hook is None:
            continue
        try:
            returned = hook(trainer, trainer.lightning_module, *args)
        except MisconfigurationException as error:
            if "`self.log()`" not in str(error):
                raise
            raise MisconfigurationException(
                f"{label} calls `log`, which Lightning's own hooks alone can: write "
                "`pl_module.iteration_log.mean(name, value)`, or `max` or `sum`."
            ) from error
        if returned is not None:
            raise TypeError(
                f"{label} returned a {type(returned).__name__}, which nothing reads: change what the hook is given, or "
                "set `trainer.should_stop`, and return None."
            )


def check_hooks(callback: L.Callback) -> None:
    """Raise MisconfigurationException for a method that is named like a hook and is none, or that cannot be called."""
    for method in (name for name in dir(type(callback)) if name.startswith(HOOK_PREFIXES)):
        name = f"`{type(callback).__name__}.{method}`"
        if method not in ROLLOUT_HOOKS:
            raise MisconfigurationException(
                f"{name} is no hook, and nothing would call it. Hooks: {', '.join(ROLLOUT_HOOKS)}."
            )
        try:
            check_method(callback, method, getattr(RolloutCallback, method))
        except TypeError as error:
            raise MisconfigurationException(str(error)) from error


def check_overrides(part: object) -> None:
    """Raise MisconfigurationException if a module's or data module's subclass hides a method that a run needs.

    One that calls the method, as `super().setup(stage)` does, adds to it.
    """
    kinds = type(part).__mro__
    own = [kind for kind in kinds if _is_ours(kind)]
    needed = {name for kind in own for name in vars(kind) if name.startswith("on_") or name in KEPT}
    for kind in kinds[: kinds.index(own[0])] if own else ():
        for name in sorted(needed & vars(kind).keys()):
            code = getattr(inspect.unwrap(vars(kind)[name]), "__code__", None)
            if code is not None and not _mentions(code, name):
                raise MisconfigurationException(
                    f"`{kind.__name__}.{name}` takes the place of `{own[0].__name__}.{name}`, without which a run "
                    f"goes wrong: call `super().{name}(...)` in it, or move what it does into a callback."
                )
    if getattr(part, "automatic_optimization", True) is False and own:
        raise MisconfigurationException(
            f"`{type(part).__name__}.automatic_optimization` is False, and nobody would take the optimizer's steps: "
            "leave it True. For several learning rates give one optimizer with several parameter groups."
        )


def check_one_optimizer(module: Any) -> None:
    """Raise MisconfigurationException unless a subclass's `configure_optimizers` returns one.

    It is asked with a policy without values; what it then lacks besides, it may have in the run.
    """
    loaded = module.policy
    if _is_ours(type(module).configure_optimizers):
        return
    try:
        if loaded is None:
            module.policy = load_shapes(module.policy_path, module.lora)
        made = module.configure_optimizers()
        num_optimizers = 0 if made is None else len(_configure_optimizers(made)[0])
    except Exception:
        return
    finally:
        module.policy = loaded
    if num_optimizers != 1:
        raise MisconfigurationException(
            f"`{type(module).__name__}.configure_optimizers` returns {num_optimizers} optimizers, and a run steps one: "
            "return one with several parameter groups, as `AdamW([{'params': a, 'lr': 1e-6}, {'params': b}])`."
        )


def _is_ours(thing: Any) -> bool:
    return bool(thing.__module__.partition(".")[0] == __name__.partition(".")[0])


def _mentions(code: CodeType, name: str) -> bool:
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return name in code.co_names or any(_mentions(each, name) for each in inner)
