"""Scale an 8-bit KV cache by the weights: what passes a norm is bounded, and so are its projections.

A norm's output has at most length sqrt(d) before its weights, so a query, key or value is at most sqrt(d) times the
length of its row of the projection. The bound is loose, which costs an 8-bit float little: e4m3 keeps its relative
precision over 14 octaves. It needs no calibration, cuts nothing, and new weights bring their own scales.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from copy import deepcopy
from functools import cache
from math import ceil, log2
from typing import Any

import torch
from torch import Tensor, nn

from tlt_lightning.engine.vllm import internals
from tlt_lightning.engine.vllm.internals import reach

LARGEST = 448.0  # of e4m3

_ROTATION = 2.0  # rotating a pair gains up to sqrt(2), and YaRN's factor some more
_NEEDED = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "input_layernorm.weight")
_WATCHED = re.compile(r"\.layers\.(\d+)\.(?:self_attn\.)?([qkv]_proj|[qk]_norm|input_layernorm)\.(weight|bias)$")


class CacheScales:
    """Finds each layer's scales while the policy's weights pass by.

    Args:
        names: Of all weights that will pass, by their Hugging Face names.
        norm_offset: What is added to a norm's weights before they multiply.
    """

    def __init__(self, names: Iterable[str], norm_offset: float = 0.0) -> None:
        self.norm_offset = norm_offset
        self._awaited = {index: {*parts} for index, parts in _watched(names).items()}
        self._held: dict[int, dict[str, Tensor]] = defaultdict(dict)
        self._bounds: dict[int, Tensor] = {}

    @classmethod
    def of(cls, engine: Any, names: Iterable[str]) -> CacheScales | None:
        """Return the scales to find for a live engine; None if its cache is not of 8 bit."""
        if reach(engine, "vllm_config.cache_config.cache_dtype") != "fp8":
            return None
        return cls(names, norm_offset(reach(engine, "vllm_config.model_config.model")))

    def watch(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield `tensors`; bound a layer once its last tensor has come, since a sharded one may be gone later."""
        for name, tensor in tensors:
            if found := _part(name):
                index, part = found
                held = self._held[index]
                held[part] = tensor
                if held.keys() == self._awaited[index]:
                    self._bounds[index] = bounds(self._held.pop(index), self.norm_offset)
            yield name, tensor

    def scales(self) -> dict[int, list[float]]:
        """Return the scales of queries, keys and values by layer: powers of two, which round nothing themselves."""
        if not self._bounds:
            return {}
        largest = torch.stack([*self._bounds.values()]).tolist()  # one wait for the device
        rows = [[2.0 ** ceil(log2(max(bound, 1e-9) / LARGEST)) for bound in row] for row in largest]
        return dict(zip(self._bounds, rows, strict=True))

    def write(self, engine: Any) -> None:
        """Put the scales in the layers of a live engine, in place, as CUDA graphs read them there."""
        from vllm.model_executor.layers.attention import Attention

        scales = self.scales()
        for name, layer in internals.live_model(engine).named_modules():
            if not isinstance(layer, Attention):
                continue
            index = re.search(r"\.layers\.(\d+)\.", name)
            assert index is not None, f"{name} is in no layer"
            for part, scale in zip("qkv", scales[int(index[1])], strict=True):
                reach(layer, f"_{part}_scale").fill_(scale)
                setattr(layer, f"_{part}_scale_float", scale)


@torch.no_grad()
def bounds(layer: Mapping[str, Tensor], norm_offset: float = 0.0) -> Tensor:
    """Return the most that queries, keys and values of a layer can be, whatever is read, (3,).

    Args:
        layer: Its tensors: `q_proj.weight` (N, d), `input_layernorm.weight` (d,), and biases, `q_norm` and `k_norm`
            where it has them.
        norm_offset: What is added to a norm's weights before they multiply.
    """
    scale = layer["input_layernorm.weight"] + norm_offset
    shift = layer.get("input_layernorm.bias")
    found = []
    for part in "qkv":
        norm = layer.get(f"{part}_norm.weight")
        if norm is not None:
            size = norm.shape[-1]  # of a head; Cohere's weights are (heads, D)
            most = (norm + norm_offset).float().abs().max() * size**0.5
        else:
            weight, bias = layer[f"{part}_proj.weight"], layer.get(f"{part}_proj.bias")
            rows = torch.linalg.vector_norm(weight * scale, dim=1, dtype=torch.float32) * len(scale) ** 0.5
            rows = rows if shift is None else rows + (weight @ shift).float().abs()
            most = (rows if bias is None else rows + bias.float().abs()).max()
        found.append(most if part == "v" else most * _ROTATION)
    return torch.stack(found)


def check_bounded(names: Collection[str]) -> None:
    """Raise ValueError unless `bounds` knows all through which queries, keys and values come, on this device.

    FlashAttention 3 and the CPU build read a layer's scales where `CacheScales.write` puts them; other kernels keep
    those of the first weights.
    """
    from vllm.platforms import current_platform

    layers, found = {int(index) for index in re.findall(r"\.layers\.(\d+)\.", " ".join(names))}, _watched(names)
    faults = [
        f"no {part.removesuffix('.weight')}" for part in _NEEDED if any(part not in found.get(i, ()) for i in layers)
    ]
    inner = {name.partition(".self_attn.")[2] for name in names if _part(name) is None}
    faults += sorted(f"an unknown {name}" for name in inner if "norm" in name)
    if faults:
        raise ValueError(
            "`quantization.kv_cache` 'fp8' takes its scales from the weights of each layer, and this policy's have "
            f"{', '.join(faults)}; set 'auto'."
        )
    if not (internals.is_cpu_build() or current_platform.is_device_capability_family(90)):
        raise ValueError("`quantization.kv_cache` 'fp8' is for Hopper GPUs, and CPUs for tests; set 'auto'.")


def _watched(names: Iterable[str]) -> dict[int, list[str]]:
    layers: dict[int, list[str]] = defaultdict(list)
    for index, part in filter(None, map(_part, names)):
        layers[index].append(part)
    return layers


def _part(name: str) -> tuple[int, str] | None:
    """Return the layer and the short name of a tensor that bounds something; None of others."""
    found = _WATCHED.search(name)
    return (int(found[1]), f"{found[2]}.{found[3]}") if found else None


@cache
def norm_offset(policy: str) -> float:
    """Return the offset that the norms before and in attention add to their weights: 0, or 1.

    Args:
        policy: Path or hub name, of which the config alone is read.

    Raises:
        ValueError: The norms differ or do something else, or one in attention has no weights.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(policy))
    offsets = {
        name: _offset(module)
        for name, module in model.named_modules()
        if name.endswith("input_layernorm") or (".self_attn." in name and "norm" in name.rpartition(".")[2])
        if not isinstance(module, nn.Identity)
    }
    known = {offset for offset in offsets.values() if offset in (0, 1)}
    if unknown := [name for name, offset in offsets.items() if offset not in known]:
        raise ValueError(
            "`quantization.kv_cache` 'fp8' takes its scales from the weights of each layer, and does not know what "
            f"{', '.join(sorted({name.rpartition('.')[2] for name in unknown}))} of `policy` {policy!r} do; set 'auto'."
        )
    if len(known) > 1:
        raise ValueError(
            f"`quantization.kv_cache` 'fp8' knows norms of one kind, and `policy` {policy!r} has several; set 'auto'."
        )
    return 1.0 if 1 in known else 0.0


@torch.no_grad()
def _offset(norm: nn.Module) -> float | None:
    """Return the offset that a norm adds to its weights; None if the norm has no weights."""
    norm = deepcopy(norm).to_empty(device="cpu")  # of the meta device
    weight = dict(norm.named_parameters()).get("weight")
    if weight is None:
        return None
    given, outputs = torch.linspace(-1, 2, weight.numel()).view(1, *weight.shape), []
    for value in (0.0, 1.0):
        for parameter in norm.parameters():
            parameter.zero_()
        weight.fill_(value)
        outputs.append(norm(given))
    normed = outputs[1] - outputs[0]  # what the weights multiply
    return round(float((outputs[0] * normed).sum() / normed.square().sum()), 3)
