"""Check requests before an engine takes them."""

from __future__ import annotations

from collections.abc import Sequence

from tlt_lightning.engine.base import Request


def check_requests(requests: Sequence[Request], *, max_model_len: int, vocab_size: int) -> None:
    """Raise ValueError for unanswerable requests; an unknown token would break a GPU for good.

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
