"""Say which arguments and callbacks of a Trainer a run cannot have; docs/trainer.md is made of these tables."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BatchSizeFinder,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelPruning,
    StochasticWeightAveraging,
)
from lightning.pytorch.utilities.exceptions import MisconfigurationException


@dataclass(frozen=True, slots=True)
class Rule:
    """Says which values of an argument of the Trainer a run cannot have.

    Args:
        argument: Its name, and that of the Trainer's attribute.
        is_wrong: Tells by the value.
        allowed: The values that are none of these.
        why: Ends a sentence that begins with the argument.
        instead: What to do.
    """

    argument: str
    is_wrong: Callable[[Any], bool]
    allowed: str
    why: str
    instead: str


RULES = (
    Rule(
        "max_steps",
        lambda value: value != -1,
        "-1",
        "counts optimizer steps and cannot resume an epoch exactly",
        "Give the number of policy iterations, or of epochs over texts, as `max_epochs`.",
    ),
    Rule(
        "precision",
        lambda value: value not in ("32-true", "bf16-mixed"),
        "`32-true`, `bf16-mixed`",
        "would round log-probs",
        "Use `32-true` or `bf16-mixed`.",
    ),
    Rule(
        "limit_train_batches",
        lambda value: not isinstance(value, float) or value != 1,  # an int of 1 is one batch, a float all of them
        "1.0",
        "would drop part of what every epoch learns from",
        "Lower `data.prompts_per_iteration`, for texts `data.steps_per_epoch`, or give `fast_dev_run`.",
    ),
    Rule(
        "accumulate_grad_batches",
        lambda value: value != 1,
        "1",
        "would merge optimizer steps, each of which takes as many passes as it needs",
        "Set the tokens of a pass by `data.micro_batch_tokens`, and the size of a step by `data.num_minibatches`, for "
        "texts by `data.batch_size`.",
    ),
    Rule(
        "gradient_clip_val",
        lambda value: value is not None and not value >= 0,
        "from 0",
        "is the largest norm of a gradient; a negative one would turn gradients round",
        "Use 1.0, or 0 to clip none.",
    ),
    Rule(
        "check_val_every_n_epoch",
        lambda value: value == 0,
        "from 1, None",
        "divides by zero behind the first epoch",
        "For a run without validation leave `data.val` out, or set `limit_val_batches=0`.",
    ),
)

_TUNER = (
    "tries settings on fixed batches (`Tuner`), and here every epoch makes its own: compare short runs "
    "(`max_epochs`) with other values of `optimizer` and `data` instead."
)
UNFIT: dict[type[L.Callback], str] = {
    BaseFinetuning: "freezes layers before the policy is loaded; in `setup` of a callback of your own load it by "
    "`pl_module.configure_model()`, then freeze as `pl_module.policy.get_input_embeddings().requires_grad_(False)` "
    "does, or train adapters (`model.lora`).",
    GradientAccumulationScheduler: "changes `accumulate_grad_batches`, which is 1 here; drop the callback.",
    ModelPruning: "renames the weights that it prunes, and the engine would not find them; drop the callback.",
    StochasticWeightAveraging: "copies the module before the policy is loaded and would average nothing; use "
    "`EMAWeightAveraging`, which averages the policy's weights.",
    BatchSizeFinder: _TUNER,
    LearningRateFinder: _TUNER,
}
"""Callbacks of Lightning that a run cannot have, and why."""


def check_settings(trainer: L.Trainer) -> None:
    """Raise MisconfigurationException for a value that `RULES` names, or a callback that `UNFIT` does."""
    for rule in RULES:
        if rule.is_wrong(value := getattr(trainer, rule.argument)):
            raise MisconfigurationException(f"`Trainer({rule.argument}={value!r})` {rule.why}. {rule.instead}")
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        for kind, reason in UNFIT.items():
            if isinstance(callback, kind):
                raise MisconfigurationException(f"`{type(callback).__name__}` {reason}")
