"""Count what the passes of an update keep, from shapes.

Activations are not estimated by a formula: the trunk runs once over fake tensors, which have shapes and no storage, and
what autograd would keep for the backward pass is added up. So every architecture, LoRA and autocast count as they are.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from tlt_lightning.packed_pass import without_mask
from tlt_lightning.policy import causal_lm
from tlt_lightning.sharding.units import unit_layers

GRADIENTS_AT_ONCE = 3
"""Gradients of a layer's widest tensors that its backward pass holds at once: of gate, up and their product."""


@dataclass(frozen=True, slots=True)
class Passes:
    """Describes the forward and backward passes of an update.

    Args:
        micro_batch_tokens: Tokens of the largest pass.
        longest: Tokens of the longest sequence, which a pass must hold.
        is_autocast: True if passes run in bfloat16 over weights of another type.
        is_checkpointed: True if activations are recomputed layer by layer.
        num_shards: Ranks that hold the rows of a weight together.
    """

    micro_batch_tokens: int
    longest: int
    is_autocast: bool
    is_checkpointed: bool
    num_shards: int = 1


def gathered_bytes(model: nn.Module, passes: Passes) -> float:
    """Return the bytes that a pass of a sharded model holds whole: root, a layer, and the next one, which comes early.

    Trained weights come with a gradient of the same type; that of the root is then copied to float32 to be reduced.
    """
    network, width = causal_lm(model), 2 if passes.is_autocast else 4
    layers = [sum(p.numel() for p in layer.parameters()) for layer in unit_layers(network)]
    root = sum(p.numel() for p in network.parameters()) - sum(layers)
    is_trained = any(p.requires_grad and "lora_" not in name for name, p in network.named_parameters())
    return width * (root + 2.0 * max(layers)) + ((width + 4.0) * root if is_trained else 0.0)


def kept_bytes(model: Any, passes: Passes) -> tuple[float, float]:
    """Add up what autograd keeps of one pass of a model on the meta device, its parameters left out.

    Layers keep alike: two passes, through the last layer and through the last two, tell of all.

    Returns:
        Bytes kept from the forward pass on, and those that a layer's backward pass adds: gradients of its widest
        tensors, and its own again if it is checkpointed.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    trunk: Any = causal_lm(model).base_model
    if any(getattr(trunk.config, name, 0) for name in ("num_experts", "num_local_experts", "n_routed_experts")):
        raise RuntimeError("experts are chosen by values, and shapes have none")
    layers, kept, widest = trunk.layers, [], 0.0
    with FakeTensorMode():
        # Sharded weights are gathered in half; elsewhere autocast makes copies, and keeps them for the backward pass.
        _give_storage(model, as_half=passes.is_autocast and passes.num_shards > 1)
        for number in (1, 2):
            trunk.layers = layers[-number:]
            sizes = _kept_of_pass(trunk, passes)
            kept.append(sum(sizes))
            widest = max(sizes)
    gradients = GRADIENTS_AT_ONCE * widest
    of_layer, others = kept[1] - kept[0], 2 * kept[0] - kept[1]
    if not passes.is_checkpointed:
        return others + len(layers) * of_layer, gradients
    # Every layer keeps its input; one at a time is computed again and then keeps what it did without.
    width = 2 if passes.is_autocast else next(model.parameters()).element_size()
    inputs = len(layers) * float(passes.micro_batch_tokens * trunk.config.hidden_size * width)
    return others + inputs, of_layer + gradients


def teacher_bytes(model: Any, passes: Passes) -> tuple[float, float]:
    """Return what a teacher on the meta device leaves for the policy's pass: states and head; and what its own takes.

    Its own keeps nothing: at once it has the widest tensors of a layer, as many as the backward pass of one.
    """
    head, width = causal_lm(model).get_output_embeddings(), 2 if passes.is_autocast else 4
    states = float(width * passes.micro_batch_tokens * head.weight.shape[1])
    is_gathered = passes.num_shards > 1
    gathered = gathered_bytes(model.requires_grad_(False), passes) if is_gathered else 0.0
    _, layer = kept_bytes(model.requires_grad_(True), replace(passes, is_checkpointed=False))
    return states + is_gathered * float(width * head.weight.numel()), layer + gathered


def _kept_of_pass(trunk: nn.Module, passes: Passes) -> list[float]:
    """Return the bytes of each tensor that autograd keeps of one pass, parameters left out."""
    saved: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    with (
        torch.enable_grad(),
        torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=passes.is_autocast),
        without_mask(),
    ):
        ids = torch.zeros(1, passes.micro_batch_tokens, dtype=torch.long)
        output = trunk(input_ids=ids, use_cache=False)  # holds what is kept until it is counted
    own = {parameter.untyped_storage()._cdata for parameter in trunk.parameters()}
    del output
    return [float(size) for storage, size in saved.items() if storage not in own]


def _give_storage(model: nn.Module, *, as_half: bool) -> None:
    """Put fake tensors on the CPU in the place of meta tensors: autocast knows no meta device."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if id(parameter) not in made:  # tied weights stay one
                    tensor = torch.empty(parameter.shape, dtype=torch.bfloat16 if as_half else parameter.dtype)
                    made[id(parameter)] = nn.Parameter(tensor, requires_grad=parameter.requires_grad)
                module._parameters[name] = made[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)
