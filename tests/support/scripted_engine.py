"""An engine that writes what a script says, turn after turn of each request."""

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from tlt_lightning.engine.base import OnProgress, RolloutEngine, RolloutProgress
from tlt_lightning.engine.requests import joined, not_begun, num_written, tokens_so_far
from tlt_lightning.rollout import Request, Response, Sampling

Script = Callable[[Request, int], Sequence[int]]
"""Tokens of a request's turn of this number, from 0; those beyond the request's limit are cut."""


class ScriptedEngine(RolloutEngine):
    """Writes a turn a step, in the order in which turns were asked for; remembers what it read.

    Args:
        script: What it writes.
        ends: Tokens that end a turn.
    """

    can_stop = True
    takes_from_readers = False  # as vLLM, which is written to while `generate` is read
    is_read = False
    policy_version = 0

    def __init__(self, script: Script, ends: Collection[int] = (1,)) -> None:
        self.script, self.ends = script, ends
        self.read: dict[int, list[list[int]]] = {}
        """All that it read, of each request, before each turn."""
        self.num_generates = 0

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, *, seed: int, on_progress: OnProgress | None = None
    ) -> Iterator[Response]:
        self.num_generates, self.is_read = self.num_generates + 1, True
        self.waiting, self.stopped, done, tokens = list(requests), set[int](), 0, 0
        while self.waiting:
            request = self.waiting.pop(0)
            if request.id in self.stopped:
                self.stopped.remove(request.id)
                yield not_begun(request, 0)
                continue
            turns = self.read.setdefault(request.id, [])
            turns.append(tokens_so_far(request))
            left = (request.max_tokens or sampling.max_tokens) - num_written(request)
            written = [*self.script(request, len(turns) - 1)][:left]
            done, tokens = done + 1, tokens + len(written)
            if on_progress is not None:
                on_progress(RolloutProgress(len(self.waiting), 0, done, tokens, 0, float(done)))
            reason = "stop" if written[-1] in self.ends else "length"
            yield joined(request, Response(request.id, written, [-1.0] * len(written), reason, (0,)))
        self.is_read = False

    def add(self, requests: Sequence[Request]) -> None:
        assert self.is_read or not self.takes_from_readers
        self.waiting += requests

    def stop(self, ids: Collection[int]) -> None:
        assert self.is_read or not self.takes_from_readers
        self.stopped |= {request.id for request in self.waiting} & {*ids}

    def setup(self, policy: str, *, max_model_len: int, seed: int) -> None: ...

    def update_weights(self, named_tensors: Any, version: int) -> None: ...

    def close(self) -> None: ...
