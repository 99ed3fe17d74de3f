"""Plan the memory that a vLLM engine will take of a device, from shapes and settings, before it is loaded.

Weights and cache are exact but for rounding to blocks. Steps and graphs are estimates: together a few GiB in the 7B
shape, of which vLLM decides most.
"""

from collections.abc import Collection, Mapping
from math import prod
from typing import Any

import torch

from tlt_lightning.engine.architectures import head_size
from tlt_lightning.speculation.graph_plan import arms_by_batch
from tlt_lightning.speculation.head_files import read_head

GIB = 2**30
BLOCK = 16
"""Tokens of a block of the cache."""
PIECE = 50e3
"""Bytes of a captured graph between two attention layers; measured in the 7B shape, see `engine/vllm/graphs.py`."""
WORKSPACE = 32 * 2**20
"""cuBLAS' workspace on a stream of a Hopper GPU; graphs are captured on one stream, with a drafter on three, twice."""


def gpu_bytes() -> float:
    """Return the memory of this process's GPU."""
    return float(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)


def step_tokens(device_bytes: float) -> int:
    """Return the most tokens of an engine step on a device, as vLLM takes for offline use.

    Its default for engines that are driven step by step, 2,048, is what 256 requests fill with seven drafts each.
    """
    return 16384 if device_bytes >= 70 * GIB else 8192


def planned_memory(engine: Any, policy: str, *, max_model_len: int, device_bytes: float) -> dict[str, float]:
    """Return the bytes of a `VLLMEngine` on one device, by name.

    The cache gets what `gpu_memory_utilization` leaves, and at most what all requests fill at full length; the engine's
    own executor decides so too.
    """
    from transformers import AutoConfig

    from tlt_lightning.policy import policy_shapes

    config: Any = AutoConfig.from_pretrained(policy).get_text_config()
    shapes, width = policy_shapes(policy), 4 if engine.dtype == "float32" else 2
    path = None if engine.speculation is None else engine.speculation.head
    saved = None if path is None else read_head(path)
    head = {} if saved is None else saved.tensors
    held = {
        "engine, weights": _weights(shapes, width, engine.quantization.quantized_layers(shapes)) / engine.num_ranks,
        "engine, drafter": _head(head, width, engine.num_ranks),
        "engine, graphs": 0.0 if engine.enforce_eager else _graphs(engine, config.num_hidden_layers, bool(head)),
        "engine, a step": _step(config, engine, step_tokens(device_bytes)),
        "engine, sampled drafts": 0.0 if path is None else _drafts(config, engine, width),
    }
    if engine.kv_cache_gib is not None:
        return held | {"engine, cache": engine.kv_cache_gib * GIB}
    blocks = -(-max_model_len // BLOCK) + 1
    full = (
        engine.max_num_seqs * blocks * BLOCK * _token(config, engine, width, 0 if saved is None else saved.num_layers)
    )
    left = engine.gpu_memory_utilization * device_bytes - sum(held.values())
    return held | {"engine, cache": max(0.0, min(left, full))}


def _weights(shapes: Mapping[str, tuple[int, ...]], width: int, quantized: Collection[str] = ()) -> float:
    """Return the bytes of weights; those of layers in 8 bit, `quantized`, have a byte a number."""
    narrow = {f"{layer}.weight" for layer in quantized}
    return float(sum(prod(shape) * (1 if name in narrow else width) for name, shape in shapes.items()))


def _head(shapes: Mapping[str, tuple[int, ...]], width: int, num_ranks: int) -> float:
    """Return a rank's bytes of a head: ranks of an engine share its tensors, but each has all of `fc` and norms."""
    parts = {name: 1 if len(shape) == 1 or "fc." in name else num_ranks for name, shape in shapes.items()}
    return float(sum(prod(shape) * width / parts[name] for name, shape in shapes.items()))


def _token(config: Any, engine: Any, width: int, num_own: int) -> float:
    """Return the bytes of a token's keys and values; a head has `num_own` layers of its own."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return 2.0 * (config.num_hidden_layers + num_own) * max(1, heads // engine.num_ranks) * head_size(config) * width


def _step(config: Any, engine: Any, num_tokens: int) -> float:
    """Return the bytes of the largest step: a layer's activations in 16 bit, and float32 logits, twice."""
    inner = getattr(config, "intermediate_size", 0) or 4 * config.hidden_size
    layer = num_tokens * 2.0 * (3 * config.hidden_size + 3 * inner / engine.num_ranks)
    return layer + 2 * 4.0 * engine.max_num_seqs * config.vocab_size


def _drafts(config: Any, engine: Any, width: int) -> float:
    """Return the bytes of the distributions that a head samples drafts from, kept on the V2 runner to verify by."""
    speculation = engine.speculation
    if speculation.draft_sampling == "greedy" or speculation.couples_drafts(is_v2=True):
        return 0.0
    return float(engine.max_num_seqs * speculation.max_draft_tokens * config.vocab_size * width)


def _graphs(engine: Any, num_layers: int, has_head: bool) -> float:
    """Return the bytes of CUDA graphs, without those of activations."""
    drafts = 0 if engine.speculation is None else engine.speculation.max_draft_tokens
    top = min(2 * engine.max_num_seqs * (1 + drafts), 512)  # as vLLM chooses its sizes
    sizes = [size for size in (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)) if size <= top]
    if engine.speculation is None:
        number = len(sizes) + sum(size <= engine.max_num_seqs for size in sizes)
        return PIECE * (num_layers + 1) * number + WORKSPACE
    arms = arms_by_batch(engine.speculation.selector, engine.max_num_seqs)
    plan = engine.speculation.pool.plan(arms, sizes)
    target = len(plan.piecewise) + len(plan.shapes("target"))
    drafter = len(plan.graphs) - len(plan.shapes("target")) + has_head * len(plan.piecewise)
    return PIECE * ((num_layers + 1) * target + 2 * drafter) + WORKSPACE * (6 if has_head else 1)
