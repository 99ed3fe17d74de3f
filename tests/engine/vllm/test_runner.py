"""Collecting of a step, with and without looking at each request; what a V1 runner is spared while off."""

from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.speculation_engines import ScriptedSelector
from tlt_lightning.engine.vllm import runner
from tlt_lightning.engine.vllm.runner import SpeculativeRunner, num_admissible
from tlt_lightning.engine.vllm.runner_v1 import step_plainly_without_drafts
from tlt_lightning.rollout import Request
from tlt_lightning.speculation.controller import StepResult, StrategyController
from tlt_lightning.speculation.lookup import LEARNED
from tlt_lightning.speculation.strategy import Strategy


def request(num_tokens: int = 10, stale: int = 0, drops: bool = False) -> SimpleNamespace:
    return SimpleNamespace(
        num_tokens=num_tokens,
        num_output_tokens=num_tokens - 6,
        num_stale_output_tokens=stale,
        drop_stale_output=drops,
        all_token_ids=[1] * num_tokens,
    )


class HeadlessRunner(SpeculativeRunner):
    """A runner around no model runner."""

    @property
    def num_engine_drafts(self) -> int:
        return self.controller.strategy.num_draft_tokens

    def _cache(self) -> Any:
        raise NotImplementedError


def live_scheduler(requests: dict[str, Any], waiting: tuple[Any, ...] = (), free_blocks: int = 100) -> Any:
    manager = SimpleNamespace(
        kv_cache_config=SimpleNamespace(kv_cache_groups=[None]),
        block_pool=SimpleNamespace(get_num_free_blocks=lambda: free_blocks),
    )
    return SimpleNamespace(
        running=list(requests.values()),
        waiting=list(waiting),
        max_num_running_reqs=8,
        requests=requests,
        kv_cache_manager=manager,
        block_size=4,
    )


def step(
    scheduled: dict[str, int], requests: dict[str, Any], sampled: list[list[int]], drafts: dict[str, int] | None = None
) -> list[StepResult]:
    """What the controller hears of a step of `scheduled` tokens that verifies three learned drafts at most."""
    selector = ScriptedSelector()
    selector.script = lambda state: Strategy(3)
    made = HeadlessRunner(None, StrategyController(selector, steps_per_choice=1))
    heard: list[StepResult] = []
    made.controller.finished = heard.append  # type: ignore[method-assign]
    scheduler = live_scheduler(requests)
    output = SimpleNamespace(
        num_scheduled_tokens=scheduled,
        total_num_scheduled_tokens=sum(scheduled.values()),
        scheduled_spec_decode_tokens={name: [0] * count for name, count in (drafts or {}).items()},
        finished_req_ids=set(),
        preempted_req_ids=set(),
    )
    for number, name in enumerate(requests):
        made.add(Request(id=number, prompt_ids=[1]), name, requests[name].all_token_ids)
    made.before_schedule(scheduler)
    made.before_schedule(scheduler)  # the second verifies what the first drafted
    made.after_schedule(output)
    result = SimpleNamespace(req_id_to_index={name: i for i, name in enumerate(scheduled)}, sampled_token_ids=sampled)
    made.after_step(scheduler, output, result)
    return heard


def test_only_requests_that_fit_into_the_cache_are_taken_for_admitted() -> None:
    waiting = tuple(request(num_tokens) for num_tokens in (8, 8, 5, 1))  # of 2, 2, 2 and 1 blocks
    running = {name: request() for name in "ab"}
    assert [num_admissible(live_scheduler(running, waiting, free)) for free in (2, 3, 4, 6, 8, 9)] == [0, 0, 1, 2, 3, 4]
    assert num_admissible(live_scheduler({name: request() for name in "abcdefgh"}, waiting)) == 0
    assert num_admissible(live_scheduler({name: request() for name in "abcdefg"}, waiting)) == 1


def test_the_selector_learns_with_the_requests_that_really_ran() -> None:
    (result,) = step({"a": 4, "b": 4}, {name: request() for name in "abcdef"}, [[5], [6]], drafts={"a": 3, "b": 3})
    assert result.plan.state.batch_size == 2


def test_a_preempted_request_has_nothing_to_catch_up_with() -> None:
    made = HeadlessRunner(None, StrategyController(ScriptedSelector()))
    dropped: list[Any] = []
    made.catch_up = SimpleNamespace(drop=dropped.append)  # type: ignore[assignment]
    made.before_schedule(live_scheduler({}))
    for preempted in (None, {"a"}):
        output = SimpleNamespace(num_scheduled_tokens={}, preempted_req_ids=preempted, finished_req_ids=set())
        made.after_schedule(output)
    assert dropped == [{"a"}]


def test_a_plain_step_is_collected_without_looking_at_each_request(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = {name: request() for name in "abc"}
    scheduled, sampled = dict.fromkeys("abc", 1), [[5], [6], [7]]
    with monkeypatch.context() as patch:
        patch.setattr(runner, "_is_plain_decode", lambda *args: False)
        (slow,) = step(scheduled, requests, sampled)
    monkeypatch.setattr(runner.SpeculativeRunner, "source", lambda *args: pytest.fail("looked at each request"))
    (fast,) = step(scheduled, requests, sampled)
    for result in (slow, fast):
        assert list(result.num_drafted) == [0, 0, 0]
        assert list(result.num_emitted) == [1, 1, 1]
        assert not any(result.sources)
        assert result.is_decode


@pytest.mark.parametrize(
    ("scheduled", "requests", "sampled", "emitted"),
    [
        ({"a": 1, "b": 7}, {"a": request(), "b": request()}, [[5], [6]], [1]),  # b reads its prompt
        ({"a": 1, "b": 1}, {"a": request(), "b": request()}, [[5], []], [1]),  # b reads the rest but one of its prompt
        ({"a": 1, "b": 1}, {"a": request()}, [[5], [6]], [1]),  # b has finished meanwhile
        ({"a": 1, "b": 1}, {"a": request(), "b": request(stale=1, drops=True)}, [[5], [6]], [1]),  # b was preempted
    ],
)
def test_other_steps_are_no_decode_steps(
    scheduled: dict[str, int], requests: dict[str, Any], sampled: list[list[int]], emitted: list[int]
) -> None:
    (result,) = step(scheduled, requests, sampled)
    assert not result.is_decode
    assert list(result.num_emitted) == emitted


def test_a_preempted_request_whose_token_still_counts_is_counted() -> None:
    (result,) = step({"a": 1, "b": 1}, {"a": request(), "b": request(stale=1)}, [[5], [6]])
    assert result.is_decode
    assert list(result.num_emitted) == [1, 1]


def test_verified_drafts_are_counted_by_request() -> None:
    (result,) = step({"a": 4, "b": 1}, {"a": request(), "b": request()}, [[5, 6], [7]], drafts={"a": 3})
    assert (list(result.num_drafted), list(result.num_emitted), result.is_decode) == ([3, 0], [2, 1], True)
    assert list(result.sources) == [LEARNED, None]


def test_a_step_that_everybody_has_left_is_forgotten() -> None:
    assert step({"a": 1}, {"b": request()}, [[5]]) == []


def test_a_v1_runner_without_a_head_is_a_plain_one_in_plain_steps() -> None:
    config, seen = object(), []

    class Runner:
        def __init__(self) -> None:
            self.speculative_config = config

        def execute_model(self, scheduler_output: Any) -> None:
            seen.append(self.speculative_config)

        def sample_tokens(self, grammar: Any) -> None:
            seen.append(self.speculative_config)
            if grammar:
                raise RuntimeError("broken")

    plain, is_off = Runner(), {"value": True}
    step_plainly_without_drafts(plain, lambda: is_off["value"])

    def run(drafts: dict[str, Any], scheduled: dict[str, int], grammar: Any = None) -> list[Any]:
        seen.clear()
        plain.execute_model(SimpleNamespace(num_scheduled_tokens=scheduled, scheduled_spec_decode_tokens=drafts))
        plain.sample_tokens(grammar)
        assert plain.speculative_config is config
        return list(seen)

    assert run({}, {"a": 1}) == [None, None]
    assert run({"a": [1]}, {"a": 2}) == [config, config]  # the last drafts of a strategy that was switched off
    assert run({}, {}) == [config, config]
    is_off["value"] = False
    assert run({}, {"a": 1}) == [config, config]
    is_off["value"] = True
    with pytest.raises(RuntimeError, match="broken"):
        run({}, {"a": 1}, grammar=True)
    assert plain.speculative_config is config
