"""Write without a model: an engine whose steps cost as long as they are told to, for what is around an engine."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from itertools import groupby

from typing_extensions import override

from tlt_lightning.engine.base import NamedTensors, OnProgress, RolloutEngine
from tlt_lightning.engine.progress_counter import ProgressCounter
from tlt_lightning.rollout import Request, Response, Sampling

VOCAB_SIZE = 1000


class CheapEngine(RolloutEngine):
    """Writes tokens that are sums of prompt, weights and position, up to the limit of each request.

    Args:
        step_seconds: Seconds of an engine step.
    """

    can_stop = seeds_requests = updates_running = True

    def __init__(self, step_seconds: float = 0.0) -> None:
        self.step_seconds = step_seconds
        self.sum_of_weights = 0
        self.versions: list[int] = []
        """Of all weights that it was given."""
        self._running: dict[int, tuple[Request, list[tuple[int, int]]]] = {}  # with each token and its version
        self._stopped: set[int] = set()

    @override
    def setup(self, policy: str, *, max_model_len: int, seed: int) -> None:
        """Load nothing."""

    @override
    def update_weights(self, named_tensors: NamedTensors, version: int) -> None:
        self.sum_of_weights = int(sum(tensor.sum().item() for _, tensor in named_tensors))
        self.policy_version = version
        self.versions.append(version)

    @override
    def generate(
        self, requests: Sequence[Request], sampling: Sampling, *, seed: int, on_progress: OnProgress | None = None
    ) -> Iterator[Response]:
        counter = ProgressCounter()
        self.add(requests)
        while self._running:
            time.sleep(self.step_seconds)
            ended = [response for number in [*self._running] if (response := self._step(number, sampling)) is not None]
            if on_progress is not None:
                running = [len(tokens) for _, tokens in self._running.values()]
                on_progress(counter.after_step(ended, waiting=0, running=running))
            yield from ended

    @override
    def add(self, requests: Sequence[Request]) -> None:
        self._running.update((request.id, (request, [])) for request in requests)

    @override
    def stop(self, ids: Collection[int]) -> None:
        self._stopped |= {*ids} & self._running.keys()

    @override
    def stats(self) -> dict[str, float]:
        return {"speculation/acceptance_length": 1.0}

    @override
    def state_dict(self) -> dict[str, list[int]]:
        return {"versions": [*self.versions]}

    @override
    def load_state_dict(self, state_dict: dict[str, list[int]]) -> None:
        self.versions = [*state_dict["versions"]]

    @override
    def close(self) -> None:
        self._running.clear()

    def _step(self, number: int, sampling: Sampling) -> Response | None:
        """Write a token of a request, and return its response if it has ended."""
        request, tokens = self._running[number]
        is_stopped, limit = number in self._stopped, request.max_tokens or sampling.max_tokens
        if not is_stopped:
            token = (sum(request.prompt_ids) + self.sum_of_weights + len(tokens)) % VOCAB_SIZE
            tokens.append((token, self.policy_version))
        if not is_stopped and len(tokens) < limit:
            return None
        del self._running[number]
        self._stopped.discard(number)
        segments = [(version, len([*group])) for version, group in groupby(version for _, version in tokens)]
        versions, counts = zip(*segments or [(self.policy_version, 0)], strict=True)
        return Response(
            number,
            [token for token, _ in tokens],
            [-1.0] * len(tokens),
            "unfinished" if is_stopped else "length",
            versions,
            version_tokens=counts if len(counts) > 1 else (),
        )
