"""Measure what an optimizer keeps, on a small parameter."""

from typing import Any

import torch
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor, nn

from tlt_lightning.training.optimization import fuse_adam, let_step_on_cpu


def training_bytes(model: nn.Module, optimizer: OptimizerCallable) -> float:
    """Return the bytes of a model that is trained: weights, gradients and the optimizer's state."""
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return bytes_of(model) + (4.0 + optimizer_bytes(optimizer)[0]) * trained


def bytes_of(model: nn.Module) -> float:
    """Return the bytes of a model's weights."""
    return float(sum(p.numel() * p.element_size() for p in model.parameters()))


def optimizer_bytes(build: OptimizerCallable) -> tuple[float, float]:
    """Return bytes of state, and temporary bytes of a step, for each trained number."""
    group, states = _sample_step(build)
    state = sum(map(_stored_bytes, states)) / group["params"][0].numel()
    # torch's `foreach` steps, its default on CUDA, hold one more copy of the parameters.
    is_foreach = "foreach" in group and group["foreach"] is not False and not group.get("fused")
    return state, 4.0 if is_foreach else 0.0


def has_composed_states(build: OptimizerCallable) -> bool:
    """Return True if an optimizer's states hold tensors of their own, as those of 8 bits do."""
    return any(hasattr(state, "__tensor_flatten__") for state in _sample_step(build)[1])


def _sample_step(build: OptimizerCallable) -> tuple[dict[str, Any], list[Tensor]]:
    """Return the group and the states of an optimizer that has moved one matrix, as it would on a GPU."""
    # Some optimizers keep less of matrices, or more of long ones; Muon cubes the smaller side.
    parameter = nn.Parameter(torch.zeros(256, 1024))
    parameter.grad = torch.ones_like(parameter)
    optimizer = build([{"params": [parameter]}])
    let_step_on_cpu(optimizer)
    fuse_adam(optimizer, parameter.device)
    with torch.compiler.set_stance("force_eager"):  # 8-bit ones would be compiled, for this one step
        optimizer.step()
    states = optimizer.state[parameter].values()
    return optimizer.param_groups[0], [each for each in states if isinstance(each, Tensor) and each.dim()]


def _stored_bytes(tensor: Tensor) -> float:
    """Return the bytes of a tensor; a quantised one holds tensors of codes, scales and a table."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return float(tensor.numel() * tensor.element_size())
    return sum(_stored_bytes(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0])
