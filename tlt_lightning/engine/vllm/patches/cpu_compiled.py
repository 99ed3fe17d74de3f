"""Skip a compiler run of 17 s for what takes microseconds."""

from typing import Any

from tlt_lightning.engine.vllm.internals import is_cpu_build
from tlt_lightning.engine.vllm.patches.patch import Patch


def _as_written(compiled: Any, *args: Any) -> Any:
    return getattr(compiled, "_torchdynamo_orig_callable", compiled)(*args)


PATCH = Patch(
    why="A few operations on a number a token are compiled, each in every process for up to 17 s: a sampled token's "
    "rank, a rank's part of the vocabulary, and counts of tokens that were drafted asynchronously.",
    versions="0.32, CPU build",
    is_needed=is_cpu_build,
    around={
        "vllm.v1.sample.ops.logprobs.batched_count_greater_than": _as_written,
        "vllm.v1.sample.sampler.batched_count_greater_than": _as_written,
        "vllm.model_executor.layers.vocab_parallel_embedding.get_masked_input_and_mask": _as_written,
        "vllm.v1.worker.gpu_model_runner.update_num_computed_tokens_for_batch_change": _as_written,
    },
)
