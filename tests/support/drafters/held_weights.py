"""Read back the head's weights that a live engine holds."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from tlt_lightning import VLLMEngine
from tlt_lightning.speculation.head_files import canonical_name

_STACKED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}


def different_weights(engine: VLLMEngine, sent: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Return the modules of the head that hold other weights than were sent."""
    runner = engine.inspect().speculative_runner
    assert runner is not None
    tensors = {canonical_name(name): tensor.detach() for name, tensor in sent if name != "d2t"}
    different = []
    for name, parts in _by_module(tensors):
        module = runner.head.get_submodule(name)
        expected = torch.cat(parts_of_this_rank(module, parts))
        held = held_weight(module)[: expected.shape[0]]
        if not torch.equal(held, expected.to(held.device, held.dtype)):
            different.append(name)
    return different


def _by_module(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, list[Tensor]]]:
    """Yield names of vLLM's modules, each with the saved tensors that it stacks."""
    stacks: dict[str, list[Tensor]] = {}
    order = {name: index for index, name in enumerate(_STACKED)}
    for name in sorted(tensors, key=lambda name: order.get(name.split(".")[-2], 0)):
        module, _, leaf = name.removesuffix(".weight").rpartition(".")
        path = f"{module}.{_STACKED.get(leaf, leaf)}" if module else leaf
        stacks.setdefault(path if path == "lm_head" else f"model.{path}", []).append(tensors[name])
    yield from stacks.items()


def parts_of_this_rank(module: Any, parts: list[Tensor]) -> list[Tensor]:
    """Return the parts of saved tensors that `module` holds, stacked, on this rank of a tensor-parallel engine."""
    rank, num_ranks = getattr(module, "tp_rank", 0), getattr(module, "tp_size", 1)
    if num_ranks == 1:
        return parts
    if hasattr(module, "shard_indices"):  # an output layer, whose vocabulary is padded
        held = module.shard_indices
        return [parts[0][held.org_vocab_start_index : held.org_vocab_end_index]]
    if parts[0].dim() == 1 or not hasattr(module, "output_size_per_partition"):
        return parts  # a norm or `fc`, whole on each rank
    if module.input_size_per_partition < module.input_size:
        return [parts[0].chunk(num_ranks, dim=1)[rank]]
    # Ranks that are more than the keys' heads share them.
    shared = [1, *[getattr(module, "num_kv_head_replicas", 1)] * (len(parts) - 1)]
    return [part.chunk(num_ranks // by)[rank // by] for part, by in zip(parts, shared, strict=True)]


@torch.inference_mode()
def held_weight(module: Any) -> Tensor:
    """Return a layer's weight, (outputs, inputs); read by use where the CPU packs weights."""
    if module.weight.numel():
        return module.weight
    inputs = torch.eye(getattr(module, "input_size_per_partition", module.input_size), dtype=module.weight.dtype)
    return module.quant_method.apply(module, inputs).T  # calling the module would add up what other ranks hold
