"""Import what engines need, once, and keep garbage collections from looking at it.

An engine's life has eight full collections. Each goes over all that was ever imported, in half a second: more than half
of what a small engine costs. To import this module is to freeze what is there; vLLM, which freezes and unfreezes the
heap of each engine, then leaves it as it is. vLLM's CPU build also looks through all modules, to put its kernels in
place of Triton's, in each engine anew: here once, for modules that come later get these kernels from their places.
"""

import atexit
import gc
import importlib
from typing import Any

PRELOADED = (
    "tlt_lightning.long_tail.callback",
    "tlt_lightning.module",
    "tlt_lightning.data.module",
    "tlt_lightning.engine.vllm.engine",
    "tlt_lightning.engine.vllm.scheduler",
    "vllm.entrypoints.llm",
    "vllm.v1.worker.gpu_model_runner",
    "vllm.v1.worker.gpu_worker",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.model_executor.models.qwen2",
    "speculators.models.eagle3",
    "datasets",
    "torch.nn.attention.varlen",  # asks Python for the sources of its functions, a second in each rank
    "tests.support.rl_runs",
)

gc.disable()
for name in PRELOADED:
    importlib.import_module(name)
current_platform: Any = importlib.import_module("vllm.platforms").current_platform
current_platform.register_triton_kernel_overrides()
current_platform.register_triton_kernel_overrides = lambda: None
gc.collect()
gc.freeze()
gc.enable()
atexit.register(gc.unfreeze)
gc.freeze = gc.unfreeze = lambda: None
