"""The collector alone, with an engine and ranks that do as they are told."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from tlt_lightning import PartialRollout, RewardTerm
from tlt_lightning.data.collector import RolloutCollector
from tlt_lightning.data.streams.requests import RequestStream
from tlt_lightning.data.weight_sync import WeightSync
from tlt_lightning.engine import RolloutEngine, RolloutProgress
from tlt_lightning.engine.requests import num_written
from tlt_lightning.environments.turns import Turns
from tlt_lightning.hooks import ROLLOUT_HOOKS, call_rollout_hook
from tlt_lightning.metrics import IterationLog
from tlt_lightning.policy import load_tokenizer
from tlt_lightning.ranks.idle_windows import IdleWindow
from tlt_lightning.rewards import Format, RewardPool
from tlt_lightning.rollout import Prompt, Request, Response, Sampling
from tlt_lightning.schedules.base import PendingGroup, RolloutDemand
from tlt_lightning.schedules.under_way import RolloutUnderWay
from tlt_lightning.training.fsdp2 import FSDP2Strategy

SPECIAL = {"eos_token_id": 1, "pad_token_id": None, "bos_token_id": 0}
PROMPTS = [Prompt(f"q{number}", [2], question=f"q{number}") for number in range(5)]


class Scripted(RolloutEngine):
    """Takes `fast` seconds for all requests but one, and `slow` for that one."""

    policy_version = 0
    fast, slow = 1.0, 3.0
    num_unanswered = 0
    logp = -1.0
    token_ids: Sequence[int] = (5, 1)

    def __init__(self) -> None:
        self.calls: list[str] = []

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, *, seed: int, on_progress: Any = None
    ) -> Iterator[Response]:
        num_tokens = sum(len(self.token_ids) - num_written(request) for request in requests)
        for running, seconds in ((1, self.fast), (0, self.fast + self.slow)):
            on_progress(RolloutProgress(0, running, len(requests) - running, num_tokens, 2, seconds))
        for request in requests[self.num_unanswered :]:
            logps = [-1.0] * (len(self.token_ids) - 1) + [self.logp]
            yield Response(request.id, self.token_ids, logps, "stop", (0,))

    def wake(self) -> None:
        self.calls.append("wake")

    def sleep(self) -> None:
        self.calls.append("sleep")

    def setup(self, policy: str, *, max_model_len: int, seed: int) -> None: ...

    def update_weights(self, named_tensors: Any, version: int) -> None: ...

    def close(self) -> None: ...


class Idle:
    """Other ranks, of which `num_writing` still write."""

    num_writing = 1

    @contextmanager
    def window(self) -> Iterator[IdleWindow]:
        yield IdleWindow(lambda: False, self.num_writing)


class NoSync(WeightSync):
    """Leaves the engine as it is."""

    def sync(self, *_: Any) -> None: ...


@pytest.fixture
def hooks() -> list[str]:
    return []


@pytest.fixture
def collector(hooks: list[str]) -> Iterator[RolloutCollector]:
    callback = SimpleNamespace(**{name: lambda *_, name=name: hooks.append(name) for name in ROLLOUT_HOOKS})
    ranks = {"global_rank": 0, "world_size": 1}
    trainer: Any = SimpleNamespace(
        callbacks=[callback], lightning_module=None, global_step=0, predicting=False, strategy=None, **ranks
    )
    tokenizer: Any = SimpleNamespace(decode=lambda ids: f"text of {ids}", **SPECIAL)
    pool = RewardPool([RewardTerm(function=lambda prompt, response, row: 1.0, name="one", weight=0.5)])
    idle: Any = Idle()
    engine, turns = Scripted(), Turns(tokenizer, None, end_tokens=[9])
    stream = RequestStream(engine, partial(call_rollout_hook, trainer, "on_rollout_progress"))
    yield RolloutCollector(trainer, stream, NoSync(engine), turns, pool, IterationLog(), idle)
    pool.close()


def collect(collector: RolloutCollector, prompts: Sequence[Prompt] = PROMPTS) -> list[Any]:
    return collector.collect(prompts, Sampling(), group_size=2, seed=0, first_group=3)


def test_responses_come_in_order_by_group_with_their_rewards(collector: RolloutCollector, hooks: list[str]) -> None:
    rollouts = collect(collector)
    assert [rollout.group for rollout in rollouts] == [3, 3, 4, 4, 5, 5, 6, 6, 7, 7]
    assert all(rollout.rewards == {"one": 1.0} and rollout.reward == 0.5 for rollout in rollouts)
    assert hooks == ["on_rollout_start", "on_rollout_progress", "on_rollout_progress", "on_rollout_idle"]
    assert collector.engine.calls == ["wake", "sleep"]  # type: ignore[attr-defined]


def test_a_reward_that_does_not_apply_is_no_part_of_the_sum(collector: RolloutCollector) -> None:
    def odd(completions: list[str], number: list[int]) -> list[float | None]:
        return [1.0 if number[0] % 2 else None]

    collector.rewards = RewardPool([*collector.rewards.terms, RewardTerm(function=odd, weight=2.0)])
    rollouts = collect(collector, [replace(prompt, row={"number": place}) for place, prompt in enumerate(PROMPTS)])
    assert [rollout.reward for rollout in rollouts[::2]] == [0.5, 2.5, 0.5, 2.5, 0.5]
    assert [rollout.rewards for rollout in rollouts[1:4:2]] == [{"one": 1.0}, {"one": 1.0, "odd": 1.0}]
    collector.rewards.close()


def test_speed_and_long_tail_are_those_of_the_engine_whoever_asked_for_its_responses(
    collector: RolloutCollector,
) -> None:
    class Pooled(Scripted):
        num_ranks = 2

        def generate(
            self, requests: Sequence[Request], sampling: Sampling, *, seed: int, on_progress: Any = None
        ) -> Iterator[Response]:
            for running, seconds in ((2, 1.0), (1, 2.0), (0, 4.0)):  # of 20 requests of two ranks
                on_progress(RolloutProgress(0, running, 20 - running, 80, 4, seconds))
            yield from super().generate(requests, sampling, seed=seed, on_progress=lambda _: None)

    collector.stream.engine = collector.engine = Pooled()
    collect(collector)
    assert collector.metrics == {"rollout/seconds": 4.0, "rollout/tokens_per_s": 20.0, "rollout/tail_share": 0.75}


def test_rewards_see_special_tokens_but_not_those_that_end_a_response(collector: RolloutCollector) -> None:
    assert {rollout.text for rollout in collect(collector)} == {"text of [5]"}
    assert collector.turns.words([0, 5, 7, 9, 1]) == "text of [5, 7]"


def test_the_engine_sleeps_before_an_idle_window_opens(collector: RolloutCollector) -> None:
    callback: Any = collector.trainer.callbacks[0]  # type: ignore[attr-defined]
    seen: list[list[str]] = []
    callback.on_rollout_idle = lambda *_: seen.append(list(collector.engine.calls))  # type: ignore[attr-defined]
    collect(collector)
    assert seen == [["wake", "sleep"]]


def test_tags_that_are_special_tokens_have_their_format(collector: RolloutCollector, policy_path: str) -> None:
    tokenizer = load_tokenizer(policy_path)
    tags = ["<think>", "</think>", "<answer>", "</answer>"]
    tokenizer.add_special_tokens({"additional_special_tokens": tags})
    collector.turns, collector.rewards = Turns(tokenizer, None), RewardPool([RewardTerm(function=Format())])
    ids = tokenizer("<think> 2 + 2 </think> <answer> 4 </answer> <eos>")["input_ids"]
    collector.engine.token_ids = ids  # type: ignore[attr-defined]
    assert {tokenizer.convert_tokens_to_ids(tag) for tag in tags} < set(ids)
    rollouts = collect(collector)
    assert [rollout.reward for rollout in rollouts] == [1.0] * 10, rollouts[0].text
    collector.rewards.close()


def test_without_prompts_only_the_others_are_waited_for(collector: RolloutCollector, hooks: list[str]) -> None:
    collect(collector)
    hooks.clear()
    before = dict(collector.metrics)
    assert collect(collector, []) == []
    assert hooks == ["on_rollout_idle"]
    assert collector.metrics == before
    assert collector.engine.calls == ["wake", "sleep"]  # type: ignore[attr-defined]


def test_without_prompts_a_rank_with_shards_takes_part_in_the_sync(collector: RolloutCollector) -> None:
    """In a later round of dynamic sampling, to which engines of the others, which slept, come without weights."""
    collector.trainer.strategy = FSDP2Strategy()  # type: ignore[misc]
    collector.weights.sync = lambda *_: collector.engine.calls.append("sync")  # type: ignore[attr-defined, method-assign]
    assert collect(collector) != []
    assert collect(collector, []) == []
    assert collector.engine.calls == ["wake", "sync", "sleep"] * 2  # type: ignore[attr-defined]


def test_an_iteration_begins_once_though_a_rank_with_shards_had_no_prompts_then(
    collector: RolloutCollector, hooks: list[str]
) -> None:
    collector.trainer.strategy = FSDP2Strategy()  # type: ignore[misc]
    assert collect(collector, []) == []
    assert collect(collector) != []
    assert hooks.count("on_rollout_start") == 1  # a hook that passes the policy is called on all ranks, or on none


def test_the_last_worker_has_no_idle_window(collector: RolloutCollector, hooks: list[str]) -> None:
    collector.idle.num_writing = 0  # type: ignore[union-attr]
    collect(collector)
    assert "on_rollout_idle" not in hooks


@pytest.mark.parametrize(("step", "num_probed"), [(0, [10]), (1, [])])
def test_the_engine_is_probed_by_responses_of_the_weights_of_now(
    collector: RolloutCollector, step: int, num_probed: list[int]
) -> None:
    probed: list[int] = []
    collector.trainer.global_step = step  # type: ignore[misc]
    probe: Any = SimpleNamespace(check=lambda trainer, engine, current, sampling: probed.append(len(current)))
    collector.probe = probe
    collect(collector)
    assert probed == num_probed


def test_speed_and_tail_are_those_of_all_rollouts(collector: RolloutCollector) -> None:
    assert set(collector.metrics.values()) == {0.0}
    collect(collector)
    assert collector.metrics["rollout/tail_share"] == pytest.approx(3 / 4)
    collector.engine.slow = 0.0  # type: ignore[attr-defined]
    collect(collector)
    assert collector.metrics["rollout/tail_share"] == pytest.approx(3 / 5)
    assert collector.metrics["rollout/seconds"] == 5.0
    assert collector.metrics["rollout/tokens_per_s"] == pytest.approx(40 / 5)


def test_tokens_of_earlier_rollouts_do_not_count_as_written(collector: RolloutCollector) -> None:
    begun, ended = Response(0, [5], [-1.0], "unfinished", (0,)), Response(1, [7, 1], [-1.0] * 2, "stop", (0,))
    group = PendingGroup(prompt=0, draw=0, drawn_in=0, begun_in=0, responses=(begun, ended))
    collector.engine.stop = lambda request_ids: None  # type: ignore[method-assign]
    course = RolloutUnderWay(PartialRollout(), RolloutDemand(wanted=1, iteration=1), [group], 2)
    rollouts = collector.collect(PROMPTS[:1], Sampling(), group_size=2, seed=0, under_way=course)
    assert [list(rollout.response.token_ids) for rollout in rollouts] == [[5, 1], [7, 1]]
    assert [rollout.reward for rollout in rollouts] == [0.5] * 2  # what had ended before is scored, too
    assert collector.metrics["rollout/tokens_per_s"] == pytest.approx(1 / 4)


def test_a_further_rollout_that_what_was_put_aside_is_enough_for_lets_the_engine_sleep_and_tells_nothing_of_it(
    collector: RolloutCollector, hooks: list[str]
) -> None:
    collector.engine.stats = lambda: {"speculation/acceptance_length": 3.0}  # type: ignore[method-assign]
    collect(collector)
    hooks.clear()
    collector.engine.stats = lambda: {"speculation/acceptance_length": 1.0}  # type: ignore[method-assign]
    ended = Response(0, [5, 1], [-1.0, -1.0], "stop", (0,))
    group = PendingGroup(prompt=0, draw=0, drawn_in=0, begun_in=0, responses=(ended, ended))
    course = RolloutUnderWay(PartialRollout(), RolloutDemand(wanted=1, iteration=1, is_first=False), [group], 2)
    rollouts = collector.collect(PROMPTS[:1], Sampling(), group_size=2, seed=0, under_way=course)
    assert [rollout.reward for rollout in rollouts] == [0.5, 0.5]
    assert hooks == ["on_rollout_idle"]
    assert collector.engine.calls == ["wake", "sleep"]  # type: ignore[attr-defined]
    assert collector.log.read()["speculation/acceptance_length"] == ("mean", 3.0)


def test_a_response_that_never_came_is_an_error(collector: RolloutCollector) -> None:
    collector.engine.num_unanswered = 3  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match=r"without answering requests \[-4, -2, -1\]"):
        collect(collector)


def test_a_reward_that_scores_nothing_ends_the_run_unless_it_predicts(collector: RolloutCollector) -> None:
    def broken(prompt: str, response: str, row: dict) -> float:
        raise KeyError("ground_truth")

    collector.rewards = RewardPool([RewardTerm(function=broken)])
    with pytest.raises(RuntimeError, match=r"`broken` scored none of the last 10 responses.*'ground_truth'"):
        collect(collector)
    collector.trainer.predicting = True  # type: ignore[misc]
    assert [rollout.reward for rollout in collect(collector)] == [0.0] * 10
    collector.rewards.close()


def test_weights_that_hold_no_numbers_are_an_error(collector: RolloutCollector) -> None:
    collector.engine.logp = float("nan")  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match=r"request -2 .* version 0\. The last update has broken"):
        collect(collector)
