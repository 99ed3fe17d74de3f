"""Pack experts anew when weights are reloaded."""

from typing import Any

from tlt_lightning.engine.vllm.internals import is_cpu_build
from tlt_lightning.engine.vllm.patches.patch import Patch

_MODULE = "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method"


def _setup_and_pack(setup: Any, method: Any, layer: Any, w13: Any, w2: Any) -> None:
    is_reload = method.moe_kernel is not None
    setup(method, layer, w13, w2)
    if is_reload:
        method.moe_kernel.fused_experts.process_weights_after_loading(layer)


PATCH = Patch(
    why="The CPU build packs the weights of experts when they are loaded, and not when they are reloaded: the kernel "
    "then reads plain weights as packed ones, silently, and the policy writes with wrong experts.",
    versions="0.32, CPU build",
    is_needed=is_cpu_build,
    around={f"{_MODULE}.UnquantizedFusedMoEMethod._setup_kernel": _setup_and_pack},
)
