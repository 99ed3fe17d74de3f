"""Write requests with vLLM: its parameters, its steps, its outputs as responses."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Generator, Sequence
from functools import partial
from itertools import count, islice, takewhile
from typing import TYPE_CHECKING, Any

from tlt_lightning.engine.base import RolloutProgress
from tlt_lightning.engine.progress_counter import ProgressCounter
from tlt_lightning.engine.request_order import RequestOrder
from tlt_lightning.engine.request_pool import RequestPool
from tlt_lightning.engine.requests import joined, merged, noise_seed, not_begun, num_written, tokens_left, tokens_so_far
from tlt_lightning.engine.rng import EngineRandom
from tlt_lightning.engine.vllm.internals import abort, drain, live_scheduler, reach
from tlt_lightning.engine.vllm.runner import SpeculativeRunner
from tlt_lightning.ranks.engine_ranks import EngineRanks
from tlt_lightning.rollout import Request, Response, Sampling, VerifiedDraft
from tlt_lightning.speculation.calibration import PROMPT_LENGTH, random_prompts
from tlt_lightning.speculation.strategy import OFF

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.llm_engine import LLMEngine


_WAITING_PER_END = 1024  # requests that wait are ordered anew for each so many, a millisecond of the host
_STEPS_PER_CHECK = 32  # of what the ranks of an engine have written; a check takes some 0.1 ms


class RequestWriter:
    """Writes requests with a live engine, one engine step after the other.

    Args:
        engine: vLLM's own, with current weights whenever something is written.
        speculative: Runner of drafts in that engine; None writes plainly.
        engine_ranks: The ranks that are the engine: they write the requests of all their callers.
    """

    def __init__(self, engine: LLMEngine, speculative: SpeculativeRunner | None, engine_ranks: EngineRanks) -> None:
        self._engine, self._speculative = engine, speculative
        self._scheduler: Any = live_scheduler(engine)
        self.pool = RequestPool(engine_ranks)  # what callers ask for, until it is handed to the engine
        self._order = RequestOrder()
        self._running: dict[int, Request] = {}  # those in the engine, by their number in the pool
        self._before: dict[str, int] = {}  # tokens written before this rollout, by vLLM's name of a continued request
        self._names: dict[int, str] = {}  # that name, by the request's number in the pool
        self._num_before = 0  # those tokens, and those of continued requests that have ended
        self._version = -1  # of the weights that write
        self._cuts: dict[int, list[tuple[int, int]]] = defaultdict(list)  # versions before, tokens when each ended
        self._drained: list[Response] = []  # ended in a step that new weights have cut short, and not yielded yet
        self._salt, self._salts = "", count(1)  # none while all that is cached is of the newest weights
        self._is_async = bool(reach(engine, "vllm_config.scheduler_config.async_scheduling"))
        self._numbers = EngineRandom(0)
        self._step_ended = 0.0  # 0 unless a step may be under way since
        # The V2 runner draws by seed and position, so that a continued response gets the noise that it would have had.
        self._draws_by_position = bool(reach(engine, "vllm_config.use_v2_model_runner"))

    @property
    def ids(self) -> set[int]:
        """Ids of this rank's requests that are to be written."""
        drained = [response.request_id for response in self._drained]
        return {*self.pool.of_this_rank([*self._running, *drained]), *self.pool.added}

    def stop(self, ids: Collection[int]) -> None:
        """Yield what these requests have written, before the next engine step; leave alone those that have ended."""
        self.pool.stop(self.ids & {*ids})

    def steps(
        self, requests: Sequence[Request], params: Callable[[Request], SamplingParams], seed: int, policy_version: int
    ) -> Generator[list[Response], None, None]:
        """Yield the responses of each engine step, and of each stop; meanwhile random numbers are the caller's.

        They are those of all ranks of the engine, by their numbers in the pool.
        """
        engine, engine_ranks = self._engine, self.pool.engine_ranks
        self._version, self._step_ended = policy_version, 0.0
        self._numbers = EngineRandom(engine_ranks.decide(lambda: seed))
        if self._speculative is not None:
            self._speculative.begin_rollout()
        try:
            self._compare()  # waits for all: a broadcast of `decide` may leave out ranks that are not here yet
            self.pool.add(requests)
            self._order = RequestOrder()
            # Before every step, on all ranks of the engine alike:
            # 1. What was asked for and not yielded yet is in `_running` or `_drained`, or in `pool` until they meet.
            # 2. The ranks have met (a collective) if a response was yielded since: only then can a caller have asked.
            # 3. The engine's random numbers are in force within `_begin` and `step` alone, the caller's outside.
            may_have_asked, must_arrange, num_ended = True, False, 0
            for number in count(1):
                if not number % _STEPS_PER_CHECK:
                    self._compare()
                if self._drained:
                    drained, self._drained = self._drained, []
                    yield drained
                    may_have_asked = must_arrange = True
                if may_have_asked:
                    new_requests, stopped_ids = self.pool.meet()
                    may_have_asked = bool(stopped_ids)
                    if stopped_ids:
                        yield self._stopped(new_requests, stopped_ids)
                    must_arrange |= bool(new_requests)
                    with self._numbers.in_force():
                        self._begin([each for each in new_requests if each.id not in stopped_ids], params)
                if not engine.has_unfinished_requests():
                    if may_have_asked:
                        continue
                    break
                if must_arrange:  # new requests, or so many free seats that the order of those who wait has changed
                    self._arrange(is_first=number == 1)
                    num_ended = 0
                finished = self._step(engine.step)
                num_ended += len(finished)
                must_arrange = bool(finished) and num_ended * _WAITING_PER_END >= len(self._scheduler.waiting)
                yield finished
                may_have_asked |= bool(finished) or self.pool.asks_alone  # the latter from `on_progress`
        finally:
            self._leave()

    def end_step(self) -> None:
        """End the step that is under way, if any, by the weights it began with."""
        if self._running:
            self._drained += self._step(partial(drain, self._engine))
            self._step_ended = 0.0

    def weights_changed(self, version: int, *, keep_cache: bool) -> None:
        """Begin a segment of every response that is being written, after `end_step`.

        Args:
            version: Version of the new weights.
            keep_cache: Requests that run go on with the keys and values that they have; otherwise, and where requests
                wait, all are computed anew. Only what has been computed since is shared with requests that begin later.
        """
        for request in self._scheduler.requests.values():
            self._cuts[_number(request)].append((self._version, request.num_output_tokens))
        self._version = version
        is_empty = self._engine.reset_prefix_cache(reset_running_requests=not keep_cache)
        self._salt = "" if is_empty else str(next(self._salts))
        for request in () if is_empty else self._scheduler.waiting:
            request.cache_salt = self._salt
            request.block_hashes.clear()
            request.update_block_hashes()

    def _step(self, step: Callable[[], list[Any]]) -> list[Response]:
        """Return the responses that end in a step."""
        started = time.perf_counter()
        pause = started - self._step_ended if self._is_async and self._step_ended else 0.0
        with self._numbers.in_force():
            outputs = step()
        self._step_ended = time.perf_counter()
        if self._speculative is not None:
            self._speculative.controller.account(self._step_ended - started, pause)
        return [self._ended(output) for output in outputs if output.finished]

    def _compare(self) -> None:
        """Raise RuntimeError if the ranks of the engine differ in the last tokens of their requests."""
        engine_ranks = self.pool.engine_ranks
        if engine_ranks.num_ranks > 1:
            engine_ranks.note(request.all_token_ids[-1] for request in self._scheduler.running)
            engine_ranks.is_any(False)

    def _leave(self) -> None:
        """End a rollout, also one that the caller gave up or an exception passed through."""
        if self._running:
            self._engine.abort_request([str(number) for number in self._running])
        for held in (self.pool, self._running, self._before, self._names, self._cuts, self._drained):
            held.clear()
        self._num_before = 0
        if self._speculative is not None:
            self._speculative.end_rollout()

    def write_freely(self, number: int) -> Generator[list[Response], None, None]:
        """Write `number` responses to random prompts, to time engine steps; nothing but their length ends them."""
        room = self._engine.vllm_config.model_config.max_model_len - PROMPT_LENGTH
        params = sampling_params(Sampling(max_tokens=min(room, 256)), Request(id=0, prompt_ids=()), ())
        params.ignore_eos = True
        requests = [Request(id=i, prompt_ids=ids) for i, ids in enumerate(random_prompts(number))]
        requests = requests if self.pool.engine_ranks.is_first else []
        return self.steps(requests, lambda _: params, seed=0, policy_version=0)

    def progress(self, counter: ProgressCounter, finished: Sequence[Response]) -> RolloutProgress:
        """Count an engine step that finished these responses."""
        scheduler, set_back = self._scheduler, self._set_back()
        num_before = self._num_before
        if self._before:
            waiting = islice(scheduler.waiting, len(set_back), None)
            num_before -= sum(self._before.get(request.request_id, 0) for request in waiting)
        controller = None if self._speculative is None else self._speculative.controller
        return counter.after_step(
            finished,
            waiting=len(scheduler.waiting) - len(set_back),
            running=[self._num_tokens(request) for request in (*scheduler.running, *set_back)],
            num_before=num_before,
            strategy=OFF if controller is None else controller.strategy,
            acceptance_length=1.0 if controller is None else controller.counters.acceptance_length,
        )

    def _begin(self, requests: Sequence[Request], params: Callable[[Request], SamplingParams]) -> None:
        self._running.update((request.id, request) for request in requests)
        for request in requests:
            self._order.begin(request.group, request.expected_tokens)
            prompt: Any = {"prompt_token_ids": tokens_so_far(request)}
            if self._salt:
                prompt["cache_salt"] = self._salt
            given = params(request)
            given.seed = request.seed if self._draws_by_position else noise_seed(request)
            internal_id = self._engine.add_request(str(request.id), prompt, given)
            if request.written is not None:
                self._before[internal_id], self._names[request.id] = num_written(request), internal_id
                self._num_before += num_written(request)
            if self._speculative is not None:
                tokens = self._scheduler.requests[internal_id].all_token_ids  # by reference: it grows
                self._speculative.add(request, internal_id, tokens)

    def _ended(self, output: RequestOutput) -> Response:
        drafts = () if self._speculative is None else self._speculative.verified_for.pop(output.request_id)
        request = self._running.pop(int(output.request_id))
        self._before.pop(self._names.pop(request.id, ""), None)
        cuts = [*self._cuts.pop(request.id, ()), (self._version, len(output.outputs[0].token_ids))]
        response = joined(request, as_response(output, cuts, drafts))
        self.pool.engine_ranks.note(response.token_ids)
        self._order.end(request.group, None if response.is_unfinished else len(response.token_ids))
        return response

    def _arrange(self, *, is_first: bool) -> None:
        """Put waiting requests into the order in which they are to start, where not all can."""
        scheduler, set_back = self._scheduler, self._set_back()
        waiting = list(scheduler.waiting)[len(set_back) :]
        if is_first and len(waiting) <= scheduler.max_num_running_reqs:
            return
        running = defaultdict(list)
        for request in (*scheduler.running, *set_back, *waiting):
            if tokens := self._num_tokens(request):
                running[self._group(request)].append(tokens)
        order = self._order.order([self._group(request) for request in waiting], running)
        scheduler.waiting.clear()
        scheduler.waiting.extend([*set_back, *(waiting[place] for place in order)])

    def _set_back(self) -> list[Any]:
        """Return requests set back, for lack of cache or to read all anew: they wait before all that have not begun."""
        return list(takewhile(lambda request: request.num_preemptions, self._scheduler.waiting))

    def _num_tokens(self, request: Any) -> int:
        """Return the tokens of a response so far, those from before this rollout included."""
        return request.num_output_tokens + self._before.get(request.request_id, 0)

    def _group(self, request: Any) -> int:
        return self._running[_number(request)].group

    def _stopped(self, new_requests: Sequence[Request], stopped_ids: Collection[int]) -> list[Response]:
        """Take requests out of the engine, and out of the new ones; return what is written of them."""
        outputs = abort(self._engine, [str(number) for number in self._running if number in stopped_ids])
        return [self._ended(output) for output in outputs] + [
            not_begun(request, self._version) for request in new_requests if request.id in stopped_ids
        ]


def _number(request: Any) -> int:
    """Return the number in the pool of a request of vLLM, which appends letters at random."""
    return int(request.request_id.rpartition("-")[0])


def sampling_params(sampling: Sampling, request: Request, end_token_ids: Sequence[int]) -> SamplingParams:
    """Return vLLM's sampling parameters of a request, but for its seed."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    limit = tokens_left(request, sampling)
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        min_tokens=min(max(sampling.min_tokens - num_written(request), 0), limit),
        max_tokens=limit,
        stop_token_ids=[*end_token_ids, *sampling.stop_token_ids],
        logprobs=0,  # of the sampled token alone
        flat_logprobs=True,
        stop=list(sampling.stop_strings),
        include_stop_str_in_output=True,  # else vLLM drops tokens that were sampled
        skip_special_tokens=False,  # rewards see them too
        detokenize=bool(sampling.stop_strings),
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,  # nobody else has it; vLLM would take a millisecond for a deep copy
    )


def as_response(output: RequestOutput, cuts: Sequence[tuple[int, int]], drafts: Sequence[VerifiedDraft]) -> Response:
    """Return the response in a finished output of vLLM.

    Args:
        output: vLLM's output for one response.
        cuts: The versions of the weights that wrote it, and how many tokens it had when each of them ended.
        drafts: Those verified.
    """
    completion, starts = output.outputs[0], [0, *(end for _, end in cuts)]
    versions, counts = merged([(version, end - start) for (version, end), start in zip(cuts, starts, strict=False)])
    assert completion.logprobs is not None
    assert completion.finish_reason is not None
    return Response(
        request_id=int(output.request_id),
        token_ids=completion.token_ids,
        logps=completion.logprobs.logprobs,  # type: ignore[union-attr]
        finish_reason="unfinished" if completion.finish_reason == "abort" else completion.finish_reason,
        policy_versions=versions,
        drafts=drafts,
        version_tokens=counts,
    )
