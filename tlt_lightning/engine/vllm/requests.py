"""Translate requests for vLLM, and outputs of vLLM to responses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from tlt_lightning.engine.base import Response, Sampling, VerifiedDraft

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.outputs import RequestOutput


def sampling_params(sampling: Sampling, max_tokens: int | None, end_token_ids: Sequence[int]) -> SamplingParams:
    """Return vLLM's sampling parameters; `max_tokens` None takes the limit of `sampling`."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    limit = max_tokens or sampling.max_tokens
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        min_tokens=min(sampling.min_tokens, limit),
        max_tokens=limit,
        stop_token_ids=[*end_token_ids, *sampling.stop_token_ids],
        logprobs=0,  # of the sampled token alone
        flat_logprobs=True,
        stop=list(sampling.stop_strings),
        include_stop_str_in_output=True,  # else vLLM drops tokens that were sampled
        skip_special_tokens=False,  # rewards see them too
        detokenize=bool(sampling.stop_strings),
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def response_of(output: RequestOutput, policy_version: int, drafts: Mapping[str, Sequence[VerifiedDraft]]) -> Response:
    """Return the response in a finished output of vLLM; `drafts` are those verified, by request."""
    completion = output.outputs[0]
    assert completion.logprobs is not None
    assert completion.finish_reason is not None
    return Response(
        request_id=int(output.request_id),
        token_ids=completion.token_ids,
        logps=completion.logprobs.logprobs,  # type: ignore[union-attr]
        finish_reason=completion.finish_reason,
        policy_versions=(policy_version,),
        drafts=drafts.get(output.request_id, ()),
    )
