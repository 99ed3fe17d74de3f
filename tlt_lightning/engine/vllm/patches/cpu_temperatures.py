"""Give drafts the temperatures of their own requests."""

import torch
from torch import Tensor

from tlt_lightning.engine.vllm.internals import is_cpu_build
from tlt_lightning.engine.vllm.patches.patch import Patch


def _expand_batch_to_tokens(
    usual: object, x: Tensor, cu_num_tokens: Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> Tensor:
    """Repeat each request's value for each of its drafts; return (N,), of the type of `x`.

    Args:
        usual: vLLM's, which is not called.
        x: One value per request, (B,).
        cu_num_tokens: Drafts of the requests up to and including each, (B,).
        num_tokens: Drafts in all, N.
        replace_from: Value that is replaced.
        replace_to: Its replacement.
    """
    counts = torch.diff(cu_num_tokens.long(), prepend=torch.zeros(1, dtype=torch.long))
    return x.masked_fill(x == replace_from, replace_to).repeat_interleave(counts, output_size=num_tokens)


PATCH = Patch(
    why="The CPU kernel behind `expand_batch_to_tokens` fills a copy of its result (vLLM issue 55005): drafts are "
    "verified at a temperature read from uninitialised memory, and samples follow no known distribution.",
    versions="0.25 to 0.32, CPU build",
    is_needed=is_cpu_build,
    around={"vllm.v1.sample.rejection_sampler.expand_batch_to_tokens": _expand_batch_to_tokens},
)
