"""Write requests with vLLM: its parameters, its steps, its outputs as responses."""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from tlt_lightning.engine.base import Request, Response, RolloutProgress, Sampling, VerifiedDraft
from tlt_lightning.engine.progress_counter import ProgressCounter
from tlt_lightning.engine.rng import EngineRandom
from tlt_lightning.engine.vllm.runner import SpeculativeRunner
from tlt_lightning.speculation.strategy import OFF

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.llm_engine import LLMEngine


class RequestWriter:
    """Writes requests with a live engine, one engine step after the other.

    Args:
        engine: vLLM's own, with current weights whenever something is written.
        scheduler: Of that engine.
        speculative: Runner of drafts in that engine; None writes plainly.
    """

    def __init__(self, engine: LLMEngine, scheduler: Any, speculative: SpeculativeRunner | None) -> None:
        self._engine, self._scheduler, self._speculative = engine, scheduler, speculative

    def steps(
        self,
        requests: Sequence[Request],
        params: Mapping[int | None, SamplingParams],
        numbers: EngineRandom,
        policy_version: int,
    ) -> Generator[list[Response], None, None]:
        """Yield the responses of each engine step; between steps random numbers are the caller's.

        `params` are those of each request's own limit of tokens; None is a request without one.
        """
        engine, speculative = self._engine, self._speculative
        is_async = engine.vllm_config.scheduler_config.async_scheduling
        if speculative is not None:
            speculative.begin_rollout()
        try:
            with numbers.in_force():
                self._add(requests, params)
            ended = time.perf_counter()
            while engine.has_unfinished_requests():
                started = time.perf_counter()
                pause = started - ended if is_async else 0.0
                with numbers.in_force():
                    outputs: Any = engine.step()
                ended = time.perf_counter()
                if speculative is not None:
                    speculative.controller.account(ended - started, pause)
                drafts = {} if speculative is None else speculative.verified_for
                yield [response_of(output, policy_version, drafts) for output in outputs if output.finished]
        finally:
            if engine.has_unfinished_requests():  # the caller gave up, or an exception passed through
                engine.abort_request([str(request.id) for request in requests])
            if speculative is not None:
                speculative.end_rollout()

    def progress(self, counter: ProgressCounter, finished: Sequence[Response]) -> RolloutProgress:
        """Count an engine step that finished these responses."""
        scheduler = self._scheduler
        controller = None if self._speculative is None else self._speculative.controller
        # Requests set back for lack of cache wait before all others, with what they have written.
        set_back = list(takewhile(lambda request: request.num_output_tokens, scheduler.waiting))
        return counter.after_step(
            finished,
            waiting=len(scheduler.waiting) - len(set_back),
            running=[request.num_output_tokens for request in (*scheduler.running, *set_back)],
            strategy=OFF if controller is None else controller.strategy,
            acceptance_length=1.0 if controller is None else controller.counters.acceptance_length,
        )

    def _add(self, requests: Sequence[Request], params: Mapping[int | None, SamplingParams]) -> None:
        for request in requests:
            prompt: Any = {"prompt_token_ids": list(request.prompt_ids)}
            internal_id = self._engine.add_request(str(request.id), prompt, params[request.max_tokens])
            if self._speculative is not None:
                tokens = self._scheduler.requests[internal_id].all_token_ids  # by reference: it grows
                self._speculative.add(str(request.id), internal_id, tokens)


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
