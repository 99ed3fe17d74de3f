"""Let requests with seeds of their own read long prompts in parts on a CPU."""

from __future__ import annotations

from typing import Any

import numpy as np

from tlt_lightning.engine.vllm.internals import is_cpu_build
from tlt_lightning.engine.vllm.patches.patch import Patch, Undo, replace


def _apply() -> Undo:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    keep_books = GPUModelRunner._bookkeeping_sync

    def with_rewound(self: Any, *args: Any, **options: Any) -> Any:
        batch, generators = self.input_batch, self.input_batch.generators
        for row in np.flatnonzero(self.discard_request_mask.np[: batch.num_reqs]):
            # A token sampled before the prompt was read is dropped: its number is drawn again.
            if row in generators and not self.requests[batch.req_ids[row]].output_token_ids:
                generators[int(row)].manual_seed(generators[int(row)].initial_seed())
        batch.generators = {}
        try:
            return keep_books(self, *args, **options)
        finally:
            batch.generators = generators

    return replace(GPUModelRunner, "_bookkeeping_sync", with_rewound)


PATCH = Patch(
    why="Where a prompt is read in parts, the number behind a dropped token is given back by moving the generator's "
    "offset, which those of a CPU do not have: a seeded request ends the engine.",
    versions="0.32, CPU build",
    is_needed=is_cpu_build,
    apply=_apply,
)
