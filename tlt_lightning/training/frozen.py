"""Leave weights that are never trained out of checkpoints; they come with the model."""

from collections.abc import Set
from typing import Any

from torch import nn

_STATES = ("state_dict", "current_model_state")  # the second is of Lightning's WeightAveraging, with EMA in the first


def frozen_names(module: nn.Module) -> frozenset[str]:
    """Return the names of parameters that no optimizer will have; call it before a callback may freeze others."""
    parameters = module.named_parameters(remove_duplicate=False)
    return frozenset(name for name, parameter in parameters if not parameter.requires_grad)


def drop_frozen(frozen: Set[str], checkpoint: dict[str, Any]) -> None:
    """Drop the weights named `frozen` from a checkpoint that is about to be written."""
    for state in checkpoint.keys() & set(_STATES):
        checkpoint[state] = {name: value for name, value in checkpoint[state].items() if name not in frozen}


def restore_frozen(frozen: Set[str], checkpoint: dict[str, Any], module: nn.Module) -> None:
    """Complete a checkpoint that was read by the module's own weights, so that it can be loaded strictly."""
    values = {name: value for name, value in module.state_dict().items() if name in frozen}
    for state in checkpoint.keys() & set(_STATES):
        checkpoint[state] = values | checkpoint[state]
