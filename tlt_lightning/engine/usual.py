"""Choose the engine of a run that names none."""

import importlib.util

import torch

from tlt_lightning.engine.base import RolloutEngine
from tlt_lightning.engine.transformers import TransformersEngine
from tlt_lightning.engine.vllm.engine import VLLMEngine


def usual_engine() -> RolloutEngine:
    """Return vLLM in the type that suits this machine; where it is not installed, the policy writes by itself."""
    if importlib.util.find_spec("vllm") is None:
        return TransformersEngine()
    if torch.cuda.is_available():
        return VLLMEngine(dtype="bfloat16")
    return VLLMEngine(dtype="float32", kv_cache_gib=1.0, enforce_eager=True)
