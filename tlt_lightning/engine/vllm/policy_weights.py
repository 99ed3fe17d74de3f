"""Check new weights for the policy of a live engine, then write all of them."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import torch

from tlt_lightning.engine.base import NamedTensors
from tlt_lightning.engine.vllm import internals

if TYPE_CHECKING:
    from vllm.v1.engine.llm_engine import LLMEngine

Shapes = Mapping[str, tuple[int, ...]]


def checked_weights(named_tensors: NamedTensors, expected: Shapes) -> NamedTensors:
    """Return the policy's new tensors, with names and shapes checked.

    A stream with `shapes`, as `PolicyWeights`, tells them beforehand. Any other is made a list first, which copies
    nothing where it yields live tensors. Raises ValueError as `check_shapes` does.
    """
    shapes: Shapes | None = getattr(named_tensors, "shapes", None)
    if shapes is None:
        named_tensors = list(named_tensors)
        shapes = {name: tensor.shape for name, tensor in named_tensors}
    check_shapes(shapes, expected)
    return named_tensors


def reload_policy(engine: LLMEngine, named_tensors: NamedTensors) -> None:
    """Replace the policy's weights in place; CUDA graphs and other pointers stay valid.

    If `named_tensors` or vLLM raises, the weights are neither the old nor the new ones; a later call replaces them all.

    Args:
        engine: Live.
        named_tensors: All weights.
    """
    try:
        engine.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(named_tensors)})
    except BaseException:
        _abandon_reload(engine)
        raise
    if not internals.is_cpu_build():
        torch.cuda.synchronize()  # the time is the update's, not the rollout's


def silence_loaders() -> None:
    """Silence vLLM's loaders on types of tensors, tied heads and caches that stay as they are.

    Names and shapes show what is missing or unknown before anything is loaded.
    """
    for loader in ("model_loader.reload.layerwise", "models.utils"):
        logging.getLogger(f"vllm.model_executor.{loader}").addFilter(_is_error)  # a second time adds nothing


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


def faults_of(given: Shapes, expected: Shapes, optional: Collection[str] = ()) -> dict[str, list[str]]:
    """Return the tensors that are missing, unknown and of the wrong shape, under these words."""
    both = [(name, tuple(has), tuple(expected[name])) for name, has in given.items() if name in expected]
    return {
        "missing": sorted(expected.keys() - given.keys() - {*optional}),
        "unknown": sorted(given.keys() - expected.keys()),
        "of the wrong shape": [
            f"{name} {shape} instead of {wanted}" for name, shape, wanted in both if shape != wanted
        ],
    }


def check_shapes(given: Shapes, expected: Shapes) -> None:
    """Raise ValueError that names tensors missing, unknown or of another shape."""
    found = [f"{len(names)} {fault} ({_some(names)})" for fault, names in faults_of(given, expected).items() if names]
    if found:
        raise ValueError(
            f"`update_weights` got {len(given)} tensors of a policy that has {len(expected)}, and changed nothing: "
            f"{'; '.join(found)}. Send all of the policy's tensors under their Hugging Face names, as "
            "`RLModule.policy_weights` does."
        )


def forget_reloads(engine: LLMEngine, head: Any) -> None:
    """Let go of the layers that vLLM remembers for reloading weights; call it before the engine is shut down.

    vLLM keeps a weak dictionary by layer, but its values hold loaders, which hold the layers: after the first reload of
    weights a closed engine's layers would stay until the process ends, and with them memory of vLLM's sleep mode.

    Args:
        engine: Live.
        head: The head's module in it; None without one.
    """
    from vllm.model_executor.model_loader.reload import layerwise

    remembered = internals.reach(layerwise, "LAYERWISE_INFO")
    for model in filter(None, (internals.live_model(engine), head)):
        for layer in model.modules():
            remembered.pop(layer, None)


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")


def _abandon_reload(engine: LLMEngine) -> None:
    """Close a broken reload; tensors that wait for the rest of their layer are dropped."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import layerwise

    config = internals.reach(internals.live_worker(engine), "vllm_config")
    model = internals.live_model(engine)
    for layer in model.modules():
        layerwise.get_layerwise_info(layer).load_numel = 0  # else a layer is made of what there is of it
    with set_current_vllm_config(config):
        layerwise.finalize_layerwise_reload(model, config.model_config)
