"""Import what vLLM imports while it makes a model before the memory of that model is handed out.

Constants of a module that is first imported under `with torch.device("cuda")` lie on the device, here in the pool of an
engine's weights, and live as long as the process: compressed-tensors' table of four-bit numbers is one. vLLM loads no
second engine that sleeps into a process whose pool is not empty, so `validate` failed after `fit`.
"""

from __future__ import annotations

import importlib
from functools import wraps
from typing import Any

import torch

from tlt_lightning.engine.vllm.patches.patch import Patch, Undo, replace


def _apply() -> Undo:
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader
    from vllm.model_executor.model_loader.utils import get_model_architecture

    create = BaseModelLoader.create_model

    @wraps(create)
    def create_imported(loader: Any, vllm_config: Any, model_config: Any, prefix: str = "") -> Any:
        with torch.device("cpu"):
            importlib.import_module("vllm.model_executor.layers.quantization.online.base")  # compressed-tensors, too
            get_model_architecture(model_config)
        return create(loader, vllm_config, model_config, prefix)

    return replace(BaseModelLoader, "create_model", create_imported)


PATCH = Patch(
    why="Constants of modules that are first imported while an engine's model is made stay in its weights' memory "
    "for good, and no second engine that sleeps can be loaded in the process.",
    versions="0.32",
    is_needed=lambda: True,
    apply=_apply,
)
