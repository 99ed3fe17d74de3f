"""Check requests before an engine takes them, and what it answers; join responses with their beginnings."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from operator import itemgetter

from tlt_lightning.rollout import Request, Response, Sampling
from tlt_lightning.seeds import seed_of


def check_requests(
    requests: Sequence[Request], sampling: Sampling, *, vocab_size: int, taken: Collection[int] = ()
) -> None:
    """Raise ValueError for requests that an engine would take up, and answer wrongly or break its GPU.

    Args:
        requests: What is to be written.
        sampling: How it is sampled.
        vocab_size: Tokens that the policy can read.
        taken: Ids of requests that the engine writes already.
    """
    if len({request.id for request in requests} - {*taken}) < len(requests):
        raise ValueError(f"`requests` repeats ids: {len(requests)} requests; number them, responses carry the id back.")
    prompts = {id(request.prompt_ids): request.prompt_ids for request in requests}.values()  # of a group the same
    for place, texts in (("a prompt", prompts), ("`stop_token_ids`", [sampling.stop_token_ids])):
        ends = {end(text) for text in texts if len(text) for end in (min, max)}
        if beyond := [token for token in ends if not 0 <= token < vocab_size]:
            raise ValueError(
                f"There is a token {beyond[0]} in {place}, and the policy's vocabulary is 0 to {vocab_size - 1}: take "
                "ids from the policy's own tokenizer."
            )


def expected(responses: Iterable[Response], open_ids: set[int]) -> Iterator[Response]:
    """Yield the responses of an engine, and take their ids out of `open_ids`, to which a caller may add.

    Raises:
        ValueError: A response answers no open request, or has another number of log-probs than of tokens.
    """
    for response in responses:
        num_tokens, num_logps = len(response.token_ids), len(response.logps)
        if response.request_id not in open_ids or num_tokens != num_logps:
            raise ValueError(
                f"The engine answered request {response.request_id!r} with {num_tokens} tokens and {num_logps} "
                f"log-probs; open are {sorted(open_ids)!s:.200}. Each is answered once, with a log-prob a token: "
                "`tlt_lightning.testing.check_engine` finds what is wrong."
            )
        open_ids.remove(response.request_id)
        yield response


def num_written(request: Request) -> int:
    """Return the tokens that the response had when the request was made."""
    return 0 if request.written is None else len(request.written.token_ids)


def tokens_so_far(request: Request) -> list[int]:
    """Return the tokens that the engine reads: the prompt, and the written part of the response."""
    return [*request.prompt_ids, *(() if request.written is None else request.written.token_ids)]


def tokens_left(request: Request, sampling: Sampling) -> int:
    """Return the most tokens that are still to be written."""
    limit = sampling.max_tokens if request.max_tokens is None else request.max_tokens
    return limit - num_written(request)


def noise_seed(request: Request) -> int | None:
    """Return the seed of a request's noise, for engines that draw anew with each request: a continuation has another.

    With the request's own seed a continuation would repeat the noise of what is written already.
    """
    start = num_written(request)
    return request.seed if request.seed is None or not start else seed_of(request.seed, start)


def joined(request: Request, response: Response) -> Response:
    """Return the whole response to a request that was continued by `response`, and any other as it is."""
    before = request.written
    if before is None or not before.token_ids:
        return response
    if not response.token_ids:
        return replace(before, request_id=request.id, finish_reason=response.finish_reason)
    policy_versions, version_tokens = merged([*before.segments, *response.segments])
    start = len(before.token_ids)
    return replace(
        response,
        token_ids=[*before.token_ids, *response.token_ids],
        logps=[*before.logps, *response.logps],
        policy_versions=policy_versions,
        version_tokens=version_tokens,
        drafts=[
            *before.drafts,
            *((start + at, drafter, drafted, kept) for at, drafter, drafted, kept in response.drafts),
        ],
        observed=before.observed,
    )


def merged(segments: Sequence[tuple[int, int]]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return `policy_versions` and `version_tokens` of a response whose segments these are, empty ones among them."""
    runs = groupby((segment for segment in segments if segment[1]), key=itemgetter(0))
    found = [(version, sum(count for _, count in run)) for version, run in runs]
    versions, counts = zip(*found or segments[-1:], strict=True)
    return versions, counts if len(counts) > 1 else ()


def not_begun(request: Request, version: int) -> Response:
    """Return the response to a request that was stopped before the engine took it up."""
    return joined(request, Response(request.id, [], [], "unfinished", (version,)))
