"""Shard a Hugging Face model over ranks with FSDP2, and gather its weights again, a unit at a time.

A unit is a layer; embedding, norm and head are the root, which is one unit, too. Log-probs in chunks call head and
trunk apart and never the root's `forward`: a chunk each would be a collective, and ranks have different numbers of
chunks. So the whole computation runs as one registered forward of the root, see `as_forward`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel

T = TypeVar("T")


@dataclass(frozen=True)
class Sharding:
    """Says over which ranks models are sharded, and in which type they compute.

    Args:
        mesh: The ranks. With two dimensions the second one shards, and the first one holds replicas of the shards.
        is_half: Gather and compute in bfloat16; what is held and reduced stays as it is, float32.
    """

    mesh: DeviceMesh
    is_half: bool = False

    def shard(self, model: PreTrainedModel, dtype: torch.dtype) -> None:
        """Shard a model in place, a layer at a time: no more than a unit is ever whole on the device.

        Args:
            model: On the CPU, where its weights may still lie in their files.
            dtype: Type in which shards are held, but for those of adapters, which stay as they are.
        """
        layers = unit_layers(model)
        if not layers:
            raise ValueError(
                f"`policy` is a {type(model).__name__}, which does not name the layers that `fsdp2` could shard "
                "(`_no_split_modules`); use `strategy: ddp`."
            )
        half = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if self.is_half else MixedPrecisionPolicy()
        for unit in (*layers, model):
            self._move(unit, dtype)
            # The root, too: after a pass without a backward it would stay whole, beside the engine.
            fully_shard(unit, mesh=self.mesh, mp_policy=half, reshard_after_forward=True)
        model._called = lambda function: function()  # type: ignore[assignment]
        register_fsdp_forward_method(model, "_called")

    def shard_small(self, module: nn.Module) -> None:
        """Shard what is left of a module in place, in float32: gradients of one group must be of one kind."""
        # Whole after a pass without a backward, it would show `zero_grad` other parameters than the optimizer has.
        fully_shard(module, mesh=self.mesh, reshard_after_forward=True)

    def _move(self, unit: nn.Module, dtype: torch.dtype) -> None:
        kind = self.mesh.device_type
        device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
        for name, parameter in unit.named_parameters():
            if not isinstance(parameter, DTensor):
                held = parameter.dtype if "lora_" in name else dtype
                parameter.data = parameter.data.to(device).to(held)  # in the file's type, mostly half, over the bus


def unit_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Return the layers that transformers would not split over devices, which are units when sharded."""
    names = model._no_split_modules or ()
    return [module for module in model.modules() if type(module).__name__ in names]


def as_forward(model: nn.Module, function: Callable[[], T]) -> T:
    """Return what `function` does with a model's modules, as one forward pass of the model where it is sharded."""
    called: Any = getattr(model, "_called", None)
    if called is None:
        return function()
    return called(function)


def is_sharded(model: nn.Module) -> bool:
    """Return True if a model is the root of sharded units: each pass is then a collective."""
    return isinstance(model, FSDPModule)


def named_units(model: nn.Module) -> list[tuple[nn.Module, list[str]]]:
    """Return units with the names of their own parameters, layers first; a model that is not sharded is one."""
    sharded = {name: module for name, module in model.named_modules() if is_sharded(module)}
    units = sharded or {"": model}
    names: dict[str, list[str]] = {unit: [] for unit in sorted(units, key=lambda name: not name)}  # the root last
    for name, _ in model.named_parameters():
        parents = name.split(".")
        places = (".".join(parents[:depth]) for depth in range(len(parents), -1, -1))
        names[next(place for place in places if place in units)].append(name)
    return [(units[unit], held) for unit, held in names.items()]


@contextmanager
def gathered(unit: nn.Module) -> Iterator[None]:
    """Hold a unit's own parameters whole for the block, in the type that it computes with; a collective."""
    if not isinstance(unit, FSDPModule):
        yield
        return
    unit.unshard()
    try:
        yield
    finally:
        unit.reshard()


def local(tensor: Tensor) -> Tensor:
    """Return this rank's rows of a sharded tensor, and others as they are."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """Return a sharded tensor put together, a collective that is not differentiated, and others as they are."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def total_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Return the norm of tensors together, over all ranks that hold rows of them."""
    norm = nn.utils.get_total_norm(tensors)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
