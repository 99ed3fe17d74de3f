"""Pack a tied output head anew when weights are reloaded."""

from typing import Any

from tlt_lightning.engine.vllm.internals import is_cpu_build, reach
from tlt_lightning.engine.vllm.patches.patch import Patch


def _reload_and_pack(reload: Any, runner: Any, *args: Any, **kwargs: Any) -> None:
    reload(runner, *args, **kwargs)
    model = runner.get_model()
    head = getattr(model, "lm_head", None)
    weight = getattr(head, "weight", None)
    if weight is not None and any(
        getattr(part, "weight", None) is weight for part in model.modules() if part is not head
    ):
        reach(head, "quant_method.process_weights_after_loading")(head)


PATCH = Patch(
    why="The CPU build computes logits with a packed copy of the head. Where the head is the embedding, a reload "
    "writes the embedding alone, and logits stay those of the old weights.",
    versions="0.32, CPU build",
    is_needed=is_cpu_build,
    around={"vllm.v1.worker.cpu_model_runner.CPUModelRunner.reload_weights": _reload_and_pack},
)
