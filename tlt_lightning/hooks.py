"""Declare the rollout's hooks for callbacks, and call them.

Any callback with one of these methods gets its calls; deriving from `RolloutCallback` is not required. Hooks run on
every rank, on the main thread, between engine steps.
"""

from collections.abc import Sequence
from typing import Any

import lightning as L

from tlt_lightning.engine.base import RolloutEngine, RolloutProgress
from tlt_lightning.hidden_states import PolicyText
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

    def on_texts_read(self, trainer: L.Trainer, pl_module: L.LightningModule, texts: Sequence[Sequence[int]]) -> None:
        """Read the token ids of all training texts of a `SupervisedDataModule`, before the networks are loaded."""

    def on_rollout_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Act once an iteration, when the engine has the current weights and is about to write."""

    def on_rollout_progress(self, trainer: L.Trainer, pl_module: L.LightningModule, progress: RolloutProgress) -> None:
        """Act after each engine step, and every second that rewards or environments take; return fast."""

    def on_rollout_idle(self, trainer: L.Trainer, pl_module: L.LightningModule, window: IdleWindow) -> None:
        """Use the time of a rank that is done; return as soon as `window.is_open()` is False."""

    def on_rollout_end(self, trainer: L.Trainer, pl_module: L.LightningModule, rollouts: Sequence[Rollout]) -> None:
        """Read this rank's rollouts and rewards, in training, validation and prediction.

        A `reward` that is changed here is learned from, within `trainer.training`; which rollouts there are is settled.
        """

    def on_rollout_scored(self, trainer: L.Trainer, pl_module: L.LightningModule, batch: RolloutBatch) -> None:
        """Read the whole batch that this rank learns from, advantages and log-probs filled in.

        Its groups were dealt over the ranks anew: they are not those that `on_rollout_end` has shown here.
        `old_logps` is None where the iteration takes one optimizer step and nothing asks for them before it.
        """

    def on_hidden_states(self, trainer: L.Trainer, pl_module: L.LightningModule, texts: Sequence[PolicyText]) -> None:
        """Read the texts that `pl_module.hidden_state_request` asked for, with their states.

        They are from before the update; under an asynchronous schedule those of its later steps are from amid it.
        The request is None until a callback sets it, in `on_rollout_start` at the latest, to a `HiddenStateRequest`;
        nothing calls this hook before.
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


def call_rollout_hook(trainer: L.Trainer, name: str, *args: Any) -> None:
    """Call hook `name` of every callback that has it, with the Trainer and its module."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        hook = getattr(callback, name, None)
        if hook is not None:
            hook(trainer, trainer.lightning_module, *args)
