"""A `generate` that is held open: what is asked for meanwhile, what is stopped, how progress is counted."""

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import pytest

from tlt_lightning.data.streams.requests import RequestStream
from tlt_lightning.engine import RolloutEngine, RolloutProgress
from tlt_lightning.engine.requests import not_begun
from tlt_lightning.rollout import Request, Response, Sampling


class OneByOne(RolloutEngine):
    """Answers the request that waits longest with each step, of three tokens and a second."""

    runs_on = True
    num_generates = 0

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, *, seed: int, on_progress: Any = None
    ) -> Iterator[Response]:
        self.num_generates += 1
        self.waiting, self.stopped, done = list(requests), set[int](), 0
        while self.waiting:
            request = self.waiting.pop(0)
            if request.id in self.stopped:
                yield not_begun(request, 0)
                continue
            done += 1
            on_progress(RolloutProgress(0, len(self.waiting), done, 3 * done, 3, float(done)))
            yield Response(request.id, [5, 5, 1], [-1.0] * 3, "stop", (0,))

    def add(self, requests: Sequence[Request]) -> None:
        self.waiting += requests

    def stop(self, ids: Collection[int]) -> None:
        self.stopped |= {*ids}

    def setup(self, policy: str, *, max_model_len: int, seed: int) -> None: ...

    def update_weights(self, named_tensors: Any, version: int) -> None: ...

    def close(self) -> None: ...


def ask(stream: RequestStream, *ids: int) -> None:
    stream.ask([Request(id=number, prompt_ids=[2]) for number in ids], Sampling(), seed=0)


def test_one_generate_goes_on_with_what_is_asked_for_while_it_is_open_and_another_begins_after_its_end() -> None:
    stream = RequestStream(OneByOne())
    ask(stream, 3, -7)
    assert next(stream).request_id == 3
    ask(stream, 8, 3)  # one that has been answered goes on, as a conversation does
    assert stream.open_ids == {-7, 8, 3}
    assert [response.request_id for response in stream] == [-7, 8, 3]
    assert stream.engine.num_generates == 1  # type: ignore[attr-defined]
    assert list(stream) == []
    ask(stream)
    assert list(stream) == []
    ask(stream, 9)
    assert [response.request_id for response in stream] == [9]
    assert stream.engine.num_generates == 2  # type: ignore[attr-defined]


def test_what_is_stopped_comes_back_unfinished_and_what_has_ended_is_left_alone() -> None:
    stream = RequestStream(OneByOne())
    ask(stream, 0, 1, 2)
    assert next(stream).request_id == 0
    stream.stop([0, 2])
    assert {response.request_id: response.finish_reason for response in stream} == {1: "stop", 2: "unfinished"}


def test_progress_is_that_since_the_last_beginning_whatever_the_stream_has_written_before() -> None:
    told: list[RolloutProgress] = []
    stream = RequestStream(OneByOne(), told.append)
    ask(stream, 0, 1, 2, 3)
    next(stream)
    stream.begin()
    assert stream.trace == []
    list(stream)
    assert [(each.finished, each.tokens, each.elapsed, each.total) for each in told] == [
        (1, 3, 1.0, 4),
        *((n, 3 * n, float(n), 3) for n in (1, 2, 3)),
    ]
    assert stream.trace == told[1:]


def test_a_stream_that_is_given_up_is_open_no_more() -> None:
    stream = RequestStream(OneByOne())
    ask(stream, 0, 1)
    next(stream)
    stream.close()
    assert list(stream) == []


def test_an_answer_that_nobody_waits_for_or_that_never_comes_ends_the_run() -> None:
    stream = RequestStream(OneByOne())
    ask(stream, 0)
    stream.open_ids.add(1)
    assert next(stream).request_id == 0
    with pytest.raises(RuntimeError, match=r"without answering requests \[1\]"):
        next(stream)
    stream.close()
    ask(stream, 0)
    stream.open_ids.clear()
    with pytest.raises(ValueError, match=r"answered request 0 with 3 tokens and 3 log-probs; open are \[\]"):
        next(stream)
