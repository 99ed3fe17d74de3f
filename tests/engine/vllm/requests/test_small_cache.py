"""A cache too small for all requests: some wait, some are set back, and everybody is told true numbers."""

from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.support.speculation_engines import (
    GREEDY,
    PROMPTS,
    ScriptedSelector,
    engine_of,
    greedy_gap,
    save_endless_policy,
    siblings,
)
from tlt_lightning.engine import RolloutProgress, VLLMEngine
from tlt_lightning.engine.vllm import request_writer
from tlt_lightning.engine.vllm.request_writer import RequestWriter
from tlt_lightning.engine.vllm.speculation import Speculation
from tlt_lightning.policy import PolicyWeights, load_policy
from tlt_lightning.rollout import Request
from tlt_lightning.speculation.strategy import Strategy

pytestmark = pytest.mark.vllm

KV_CACHE_GIB = 24 * 2**17 / 2**30
"""24 blocks of 128 tokens: all twelve requests begin, and eight have room for more than 256 tokens."""


def test_selectors_and_callbacks_hear_of_the_requests_that_really_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, selector = (
        save_endless_policy(tmp_path / "policy", max_position_embeddings=512),
        ScriptedSelector(("sibling",)),
    )
    asked: list[int] = []

    def script(state: Any) -> Strategy:
        asked.append(state.batch_size)
        return Strategy(2, "sibling")

    selector.script = script
    engine = VLLMEngine(
        dtype="float32",
        kv_cache_gib=KV_CACHE_GIB,
        max_num_seqs=16,
        enforce_eager=True,
        speculation=Speculation(selector=selector, siblings=True, max_draft_tokens=5, steps_per_choice=1),
    )
    engine.setup(policy, max_model_len=512, seed=0)
    try:
        engine.update_weights(PolicyWeights(load_policy(policy)), 0)
        scheduler, set_back = engine.inspect().scheduler, []
        preempt = scheduler._preempt_request

        def count(*args: Any, **kwargs: Any) -> None:
            set_back.append(1)
            preempt(*args, **kwargs)

        monkeypatch.setattr(scheduler, "_preempt_request", count)
        requests = [Request(id=r.id, prompt_ids=r.prompt_ids, max_tokens=250 + 10 * r.id) for r in siblings()]
        seen: list[RolloutProgress] = []
        ran: Counter[int] = Counter()

        def on_progress(progress: RolloutProgress) -> None:
            seen.append(progress)
            ran[len(scheduler.running)] += 1

        responses = list(engine.generate(requests, GREEDY, seed=0, on_progress=on_progress))
    finally:
        engine.close()
    assert set_back
    assert [r.finish_reason for r in responses] == ["length"] * 12
    by_id = {r.request_id: list(r.token_ids) for r in responses}
    assert greedy_gap(policy, [list(r.prompt_ids) for r in requests], [by_id[r.id] for r in requests]) < 1e-3
    for earlier, later in pairwise(seen):
        assert later.tokens >= earlier.tokens
        assert later.waiting <= earlier.waiting
        assert later.total == 12
    assert all(state.batch_size == len(emitted) for state, _, emitted, _ in selector.records)
    wrong = Counter(asked)
    wrong.subtract(ran)
    assert sum(map(abs, wrong.values())) < 0.1 * len(asked)


def test_those_that_wait_start_longest_expected_first(tmp_path: Path) -> None:
    expected = [3, 50, 0, 40]
    requests = [
        Request(id=i, prompt_ids=PROMPTS[i % 4], group=i % 4, max_tokens=4, expected_tokens=expected[i % 4])
        for i in range(8)
    ]
    with engine_of(save_endless_policy(tmp_path / "policy"), None, max_num_seqs=1) as engine:
        order = [response.request_id for response in engine.generate(requests, GREEDY, seed=0)]
    # Nothing is known of group 2: one of its requests tells. Answers of 4 tokens lower what is expected of the others.
    assert order == [2, 1, 3, 5, 7, 6, 0, 4]


def test_many_that_wait_are_not_ordered_anew_with_every_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []
    arrange = RequestWriter._arrange

    def record(writer: RequestWriter, *, is_first: bool) -> None:
        lengths.append(len(writer._scheduler.waiting))
        arrange(writer, is_first=is_first)

    monkeypatch.setattr(RequestWriter, "_arrange", record)
    monkeypatch.setattr(request_writer, "_WAITING_PER_END", 2)
    requests = [Request(id=i, prompt_ids=PROMPTS[i % 4], group=i % 4, max_tokens=4) for i in range(9)]
    with engine_of(save_endless_policy(tmp_path / "policy"), None, max_num_seqs=1) as engine:
        assert len(list(engine.generate(requests, GREEDY, seed=0))) == 9
    assert lengths == [9, 6, 4, 2, 1]  # that wait: after the first, once half as many have ended
