"""Skip a compiler run of 17 s at the first log-prob."""

from __future__ import annotations

from typing import Any

from tlt_lightning.engine.vllm.internals import is_cpu_build
from tlt_lightning.engine.vllm.patches.patch import Patch, Replace

_NAME = "batched_count_greater_than"


def _as_written() -> Any:
    """Return the function before vLLM's compilation; None if not compiled."""
    from vllm.v1.sample.ops import logprobs

    return getattr(getattr(logprobs, _NAME), "_torchdynamo_orig_callable", None)


def _apply(replace: Replace) -> None:
    from vllm.v1.sample import sampler
    from vllm.v1.sample.ops import logprobs

    plain = _as_written()
    for module in (logprobs, sampler):
        if hasattr(module, _NAME):
            replace(module, _NAME, plain)


PATCH = Patch(
    why="The rank of a sampled token, a sum that takes microseconds, is compiled for 17 s at the first log-prob.",
    versions="0.32, CPU build",
    is_needed=lambda: is_cpu_build() and _as_written() is not None,
    apply=_apply,
)
