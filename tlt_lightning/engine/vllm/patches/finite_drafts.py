"""Let a head sample its drafts from finite logits, whatever its weights and the policy's states make of them.

Rejection sampling is exact for every distribution q that a draft is drawn from, if there is one. Where a logit of the
head is no number or infinite, all of q is NaN: vLLM then rejects the draft, finds no token of positive `max(p - q, 0)`
and writes token 0, which the policy has not drawn. Half precision gets there in single rows, with good weights.

It takes two short kernels a draft, within the CUDA graph where there is one.
"""

from typing import Any

from tlt_lightning.engine.vllm.patches.patch import Patch

LARGEST = 600.0
"""A logit's bound: over the least temperature, 0.01, float16 still holds it, and its softmax is that of infinity."""


def finite(logits: Any) -> Any:
    """Bound logits in place and return them; NaN becomes 0. None stays, as ranks get that hold no logits."""
    if logits is None:
        return None
    return logits.nan_to_num_(nan=0.0, posinf=LARGEST, neginf=-LARGEST).clamp_(-LARGEST, LARGEST)


def _compute_finite(compute: Any, *args: Any, **kwargs: Any) -> Any:
    return finite(compute(*args, **kwargs))


def _sample_finite(sample: Any, speculator: Any, logits: Any, *args: Any) -> Any:  # with what the token before adds
    return sample(speculator, finite(logits), *args)


PATCH = Patch(
    why="A head whose logits are not finite, drafting by sampling, writes token 0 into the policy's text.",
    versions="0.32, both model runners",
    around={
        "vllm.model_executor.models.llama_eagle3.Eagle3LlamaForCausalLM.compute_logits": _compute_finite,
        "vllm.v1.worker.gpu.spec_decode.dspark.speculator.DSparkSpeculator._sample_logits": _sample_finite,
    },
)
