"""Requests as engines take them and responses as vLLM gives them, checked before anything is asked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tlt_lightning.engine.base import Request, Response, Sampling

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.outputs import RequestOutput


def check_requests(requests: Sequence[Request], *, max_model_len: int, vocab_size: int) -> None:
    """Raise ValueError unless all can be answered; a token beyond the vocabulary would break a GPU for good.

    Args:
        requests: What is to be written.
        max_model_len: Tokens of prompt and response that the engine was set up for.
        vocab_size: Tokens that the policy can read.
    """
    if len({request.id for request in requests}) < len(requests):
        raise ValueError(f"`requests` repeats ids: {len(requests)} requests; number them, responses carry the id back.")
    for request in requests:
        prompt = request.prompt_ids
        if not 1 <= len(prompt) < max_model_len:
            raise ValueError(
                f"`requests` has a prompt of {len(prompt)} tokens (id {request.id}); it must have at least 1 and leave "
                f"room for a response in `max_model_len`, which is {max_model_len}: shorten it, or set up for more."
            )
        if request.max_tokens is not None and request.max_tokens < 1:
            raise ValueError(
                f"`requests` asks for a response of {request.max_tokens} tokens (id {request.id}); `max_tokens` must "
                "be at least 1, or None for the limit of `sampling`."
            )
        if not 0 <= min(prompt) <= max(prompt) < vocab_size:
            token = min(prompt) if min(prompt) < 0 else max(prompt)
            raise ValueError(
                f"`requests` has a prompt with token {token} (id {request.id}); the policy's vocabulary is 0 to "
                f"{vocab_size - 1}: use the policy's own tokenizer."
            )


def sampling_params(sampling: Sampling, max_tokens: int | None, end_token_ids: Sequence[int]) -> SamplingParams:
    """Return vLLM's parameters for requests of at most `max_tokens` tokens; None takes the limit of `sampling`."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=max_tokens or sampling.max_tokens,
        stop_token_ids=[*end_token_ids, *sampling.stop_token_ids],
        logprobs=0,  # of the sampled token alone
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def response_of(output: RequestOutput, policy_version: int) -> Response:
    """Return the response in a finished output of vLLM."""
    completion = output.outputs[0]
    assert completion.logprobs is not None
    assert completion.finish_reason is not None
    return Response(
        request_id=int(output.request_id),
        token_ids=completion.token_ids,
        logps=completion.logprobs.logprobs,  # type: ignore[union-attr]
        finish_reason=completion.finish_reason,
        policy_versions=(policy_version,),
    )
