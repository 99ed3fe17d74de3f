"""What vLLM's CPU build gets wrong or slow, each put right only where a direct test finds it."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

log = logging.getLogger(__name__)


def repair_cpu_sampling() -> None:
    """Repair sampling under speculation in this process; call once an engine is there, safe to call again."""
    from vllm.v1.sample import rejection_sampler

    if expands_wrongly():
        log.debug("vLLM's `expand_batch_to_tokens` is wrong on this CPU build and is replaced.")
        rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens


def spare_logprob_compilation() -> None:
    """Spare a 17 s compilation at the first log-prob, of a sum that takes microseconds as it is written."""
    from vllm.v1.sample import sampler
    from vllm.v1.sample.ops import logprobs

    compiled = logprobs.batched_count_greater_than
    plain = getattr(compiled, "_torchdynamo_orig_callable", None)
    if plain is not None:
        logprobs.batched_count_greater_than = plain
        if getattr(sampler, "batched_count_greater_than", None) is compiled:
            sampler.batched_count_greater_than = plain


def expands_wrongly() -> bool:
    """True if the temperatures of requests do not reach their drafts (vLLM issue 55005).

    The kernel behind `expand_batch_to_tokens` fills a copy of its result, so that drafts are verified at a temperature
    read from uninitialised memory: what is sampled under speculation then follows no known distribution.
    """
    from vllm.v1.sample import rejection_sampler

    if rejection_sampler.expand_batch_to_tokens is expand_batch_to_tokens:
        return False
    values, ends = torch.tensor([0.5, 0.0, 2.0]), torch.tensor([2, 3, 6], dtype=torch.int32)
    expanded = torch.full((6,), float("nan"))  # what the kernel must overwrite
    rejection_sampler._expand(expanded, values, ends, 0, 1)
    return not torch.equal(expanded, torch.tensor([0.5, 0.5, 1.0, 2.0, 2.0, 2.0]))


def expand_batch_to_tokens(
    x: Tensor, cu_num_tokens: Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> Tensor:
    """Repeat each request's value for each of its drafts.

    Args:
        x: One value per request, (B,).
        cu_num_tokens: Drafts of the requests up to and including each, (B,).
        num_tokens: Drafts in all, N.
        replace_from: Value that is replaced.
        replace_to: What it is replaced by.

    Returns:
        (N,), of the type of `x`.
    """
    counts = torch.diff(cu_num_tokens.long(), prepend=torch.zeros(1, dtype=torch.long))
    return x.masked_fill(x == replace_from, replace_to).repeat_interleave(counts, output_size=num_tokens)
