"""Roll out with the policy itself, through Hugging Face `generate`."""

from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from typing_extensions import override

from tlt_lightning.arguments import Count, checked
from tlt_lightning.engine.base import NamedTensors, OnProgress, RolloutEngine
from tlt_lightning.engine.progress_counter import ProgressCounter
from tlt_lightning.engine.requests import (
    check_requests,
    joined,
    noise_seed,
    not_begun,
    num_written,
    tokens_left,
    tokens_so_far,
)
from tlt_lightning.engine.rng import EngineRandom
from tlt_lightning.rollout import Request, Response, Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class TransformersEngine(RolloutEngine):
    """Generates with the live policy: no second copy of weights, much slower than vLLM.

    Never speculates. For machines without vLLM, and the reference that other engines are tested against.

    Args:
        batch_size: Requests generated together; a batch runs until its longest response is done. Requests with a seed
            of their own are a batch each.
    """

    can_stop = True

    @checked()
    def __init__(self, batch_size: Count = 64) -> None:
        self.batch_size = batch_size
        self._model: PreTrainedModel | None = None
        self._sampling: Sampling | None = None  # of the `generate` that is being read
        self._waiting: list[Request] = []
        self._stopping: set[int] = set()  # ids of requests that are to stop

    @override
    def setup(self, policy: str, *, max_model_len: int, seed: int) -> None:
        from tlt_lightning.policy import end_token_ids, load_tokenizer

        self._tokenizer = load_tokenizer(policy)
        self._end_token_ids = end_token_ids(policy, self._tokenizer)
        self._max_model_len = max_model_len

    @override
    def attach(self, model: "PreTrainedModel") -> None:
        self._model = model

    @override
    def update_weights(self, named_tensors: NamedTensors, version: int) -> None:
        self.policy_version = version  # the attached policy is the source of these tensors

    @override
    def close(self) -> None:
        self._model, self.policy_version = None, -1

    @override
    def generate(
        self, requests: Sequence[Request], sampling: Sampling, *, seed: int, on_progress: OnProgress | None = None
    ) -> Iterator[Response]:
        if self._model is None or self.policy_version < 0:
            raise RuntimeError("The engine holds no current weights: call `attach` and `update_weights` first.")
        self._waiting, self._sampling = [], sampling
        counter, numbers, num_before = ProgressCounter(), EngineRandom(seed), 0
        try:
            self.add(requests)
            while self._waiting:
                num_before += sum(map(num_written, self._waiting))
                if self._stopping:
                    responses = [not_begun(r, self.policy_version) for r in self._waiting if r.id in self._stopping]
                    self._waiting = [request for request in self._waiting if request.id not in self._stopping]
                    self._stopping.clear()
                else:
                    batch, limit = self._next_batch(sampling)
                    noise = noise_seed(batch[0])
                    with (numbers if noise is None else EngineRandom(noise)).in_force():
                        responses = self._generate_batch(batch, limit, sampling)
                num_before -= sum(map(num_written, self._waiting))
                if on_progress is not None:
                    on_progress(counter.after_step(responses, waiting=len(self._waiting), num_before=num_before))
                yield from responses
        finally:
            self._sampling = None
            self._stopping.clear()

    @override
    def add(self, requests: Sequence[Request]) -> None:
        if self._model is None or self._sampling is None:
            raise RuntimeError("`add` found nobody reading `generate`; call it between two of its responses.")
        taken = [request.id for request in self._waiting]
        vocab_size = self._model.config.get_text_config().vocab_size
        check_requests(requests, self._sampling, vocab_size=vocab_size, taken=taken)
        self._waiting += requests

    @override
    def stop(self, ids: Collection[int]) -> None:
        if self._sampling is None:
            raise RuntimeError("`stop` found nobody reading `generate`; call it between two of its responses.")
        self._stopping |= {request.id for request in self._waiting} & {*ids}

    def _next_batch(self, sampling: Sampling) -> tuple[list[Request], int]:
        """Take waiting requests whose prompts have one length, so that none is padded; return them and their limit."""

        def shape(request: Request) -> tuple[int, int, int, bool]:
            length = len(tokens_so_far(request))
            limit = min(tokens_left(request, sampling), self._max_model_len - length)
            return length, limit, num_written(request), request.seed is not None

        self._waiting.sort(key=shape)
        first = shape(self._waiting[0])
        same = list(takewhile(lambda request: shape(request) == first, self._waiting))
        batch = same[: 1 if first[-1] else self.batch_size]
        del self._waiting[: len(batch)]
        return batch, first[1]

    @torch.no_grad()
    def _generate_batch(self, batch: Sequence[Request], limit: int, sampling: Sampling) -> list[Response]:
        from transformers import GenerationConfig

        assert self._model is not None
        model = self._model
        input_ids = torch.tensor([tokens_so_far(request) for request in batch], device=model.device)
        is_training, config_of_checkpoint = model.training, model.generation_config
        model.eval()
        # Whatever the checkpoint asks for beside `Sampling` (a repetition penalty, say) would change what is sampled.
        model.generation_config = GenerationConfig()
        try:
            output = model.generate(  # type: ignore[operator]
                input_ids=input_ids,
                attention_mask=torch.ones_like(input_ids),
                max_new_tokens=limit,
                do_sample=sampling.temperature > 0,
                temperature=sampling.temperature or None,
                top_p=sampling.top_p if sampling.temperature > 0 else None,
                top_k=sampling.top_k if sampling.temperature > 0 else None,
                min_p=(sampling.min_p or None) if sampling.temperature > 0 else None,
                min_new_tokens=min(max(sampling.min_tokens - num_written(batch[0]), 0), limit),
                stopping_criteria=[self._stops(sampling, input_ids.shape[1])],
                eos_token_id=[*self._end_token_ids, *sampling.stop_token_ids],
                pad_token_id=self._end_token_ids[0],
                return_dict_in_generate=True,
                output_scores=True,  # after temperature, top-p and top-k: what was sampled from
            )
        finally:
            model.train(is_training)
            model.generation_config = config_of_checkpoint
        tokens = output.sequences[:, input_ids.shape[1] :]  # (B, T)
        logps = torch.stack([scores.float().log_softmax(-1) for scores in output.scores], dim=1)  # (B, T, V)
        logps = logps.gather(-1, tokens[..., None]).squeeze(-1)
        return [self._response(*item, sampling) for item in zip(batch, tokens, logps, strict=True)]

    def _stops(self, sampling: Sampling, num_prompt_tokens: int) -> Callable[..., Tensor]:
        """Return a criterion of `generate`: which rows hold a stop string."""

        def ended(input_ids: Tensor, scores: object) -> Tensor:
            rows = input_ids[:, num_prompt_tokens:].tolist()
            return torch.tensor([self._is_ended(row, sampling) for row in rows], device=input_ids.device)

        return ended

    def _is_ended(self, token_ids: list[int], sampling: Sampling) -> bool:
        """Return True if a stop string ends in the text after its first `min_tokens` tokens."""
        if not sampling.stop_strings:
            return False
        text, begun = (str(self._tokenizer.decode(ids)) for ids in (token_ids, token_ids[: sampling.min_tokens]))
        start = len(begun)
        return any(text.find(stop, max(0, start - len(stop) + 1)) >= 0 for stop in sampling.stop_strings)

    def _response(self, request: Request, tokens: Tensor, logps: Tensor, sampling: Sampling) -> Response:
        ends = torch.isin(tokens, torch.tensor([*self._end_token_ids, *sampling.stop_token_ids], device=tokens.device))
        if sampling.stop_strings:
            is_ended = [self._is_ended(tokens[: n + 1].tolist(), sampling) for n in range(len(tokens))]
            ends |= torch.tensor(is_ended, device=ends.device)
        stopped = bool(ends.any())
        length = int(ends.int().argmax()) + 1 if stopped else len(tokens)
        response = Response(
            request_id=request.id,
            token_ids=tokens[:length].tolist(),
            logps=logps[:length].tolist(),
            finish_reason="stop" if stopped else "length",
            policy_versions=(self.policy_version,),
        )
        return joined(request, response)
