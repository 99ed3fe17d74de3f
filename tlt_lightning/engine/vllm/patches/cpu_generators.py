"""Let requests with seeds of their own read long prompts in parts on a CPU."""

from typing import Any

import numpy as np

from tlt_lightning.engine.vllm.internals import is_cpu_build
from tlt_lightning.engine.vllm.patches.patch import Patch


def _without_those_dropped(sample: Any, runner: Any, *args: Any, **options: Any) -> Any:
    generators = runner.input_batch.generators
    dropped = np.flatnonzero(runner.discard_request_mask.np[: runner.input_batch.num_reqs])
    kept = {row: generators.pop(row) for row in dropped.tolist() if row in generators}
    try:
        return sample(runner, *args, **options)
    finally:
        generators.update(kept)


PATCH = Patch(
    why="Where a prompt is read in parts, the number behind a dropped token is given back by moving the generator's "
    "offset, which those of a CPU do not have: a seeded request ends the engine. Here none is drawn.",
    versions="0.32, CPU build",
    is_needed=is_cpu_build,
    around={"vllm.v1.worker.gpu_model_runner.GPUModelRunner.sample_tokens": _without_those_dropped},
)
