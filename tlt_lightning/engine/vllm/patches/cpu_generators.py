"""Let requests with seeds of their own read long prompts in parts on a CPU."""

from __future__ import annotations

from typing import Any

import numpy as np

from tlt_lightning.engine.vllm.internals import is_cpu_build
from tlt_lightning.engine.vllm.patches.patch import Patch, Replace


def _apply(replace: Replace) -> None:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    sample_tokens = GPUModelRunner.sample_tokens

    def without_those_dropped(self: Any, *args: Any, **options: Any) -> Any:
        generators, dropped = self.input_batch.generators, self.discard_request_mask.np[: self.input_batch.num_reqs]
        kept = {row: generators.pop(row) for row in np.flatnonzero(dropped).tolist() if row in generators}
        try:
            return sample_tokens(self, *args, **options)
        finally:
            generators.update(kept)

    replace(GPUModelRunner, "sample_tokens", without_those_dropped)


PATCH = Patch(
    why="Where a prompt is read in parts, the number behind a dropped token is given back by moving the generator's "
    "offset, which those of a CPU do not have: a seeded request ends the engine. Here none is drawn.",
    versions="0.32, CPU build",
    is_needed=is_cpu_build,
    apply=_apply,
)
