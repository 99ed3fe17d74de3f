"""Skip a compiler run of 17 s at the first log-prob."""

from typing import Any

from tlt_lightning.engine.vllm.internals import is_cpu_build
from tlt_lightning.engine.vllm.patches.patch import Patch


def _as_written(compiled: Any, *args: Any) -> Any:
    return getattr(compiled, "_torchdynamo_orig_callable", compiled)(*args)


PATCH = Patch(
    why="The rank of a sampled token, a sum that takes microseconds, is compiled for 17 s at the first log-prob.",
    versions="0.32, CPU build",
    is_needed=is_cpu_build,
    around={
        f"vllm.v1.sample.{module}.batched_count_greater_than": _as_written for module in ("ops.logprobs", "sampler")
    },
)
