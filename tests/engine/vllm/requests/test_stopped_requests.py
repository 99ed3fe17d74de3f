"""Requests that are stopped and continued: cache, counts, look-ups and alarm of a live engine stay right."""

import itertools
import logging
import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file

from tests.support.drafters.eagle_head import make_head, save_head
from tests.support.speculation_engines import (
    GREEDY,
    PROMPTS,
    ScriptedSelector,
    greedy_gap,
    save_endless_policy,
    siblings,
    write_in_pieces,
)
from tlt_lightning.engine import RolloutProgress, VLLMEngine
from tlt_lightning.engine.vllm import internals
from tlt_lightning.engine.vllm.speculation import Speculation
from tlt_lightning.policy import PolicyWeights, load_policy
from tlt_lightning.rollout import Request, Response
from tlt_lightning.speculation.strategy import OFF, Strategy

pytestmark = pytest.mark.vllm

KV_CACHE_GIB = 24 * 5 * 2**15 / 2**30
"""24 blocks of 128 tokens, of the policy's four layers and the head's one: twelve requests begin, eight can end."""


class Setup(NamedTuple):
    engine: VLLMEngine
    selector: ScriptedSelector
    policy: str
    head: dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    path = tmp_path_factory.mktemp("engine")
    policy = save_endless_policy(path / "policy", max_position_embeddings=512)
    head = save_head(make_head(policy, seed=5), path / "head")
    selector = ScriptedSelector(("learned", "sibling", "mixed"), longest=3)
    engine = VLLMEngine(
        dtype="float32",
        kv_cache_gib=KV_CACHE_GIB,
        max_num_seqs=16,
        enforce_eager=True,
        sleep=False,
        speculation=Speculation(selector=selector, head=head, siblings=True, max_draft_tokens=3, steps_per_choice=1),
    )
    engine.setup(policy, max_model_len=512, seed=0)
    try:
        engine.update_weights(PolicyWeights(load_policy(policy)), 0)
        yield Setup(engine, selector, policy, load_file(f"{head}/model.safetensors"))
    finally:
        engine.close()


def pieces(
    setup: Setup, requests: list[Request], num_steps: int
) -> Iterator[tuple[dict[int, Response], list[RolloutProgress]]]:
    """Yield all responses so far and the counts of each rollout; each is stopped after so many engine steps."""
    written: dict[int, Response] = {}
    while asked := [
        replace(r, written=written.get(r.id)) for r in requests if r.id not in written or written[r.id].is_unfinished
    ]:
        seen: list[RolloutProgress] = []

        def note(progress: RolloutProgress, seen: list[RolloutProgress] = seen) -> None:
            seen.append(progress)
            if len(seen) == num_steps:
                setup.engine.stop([request.id for request in requests])

        for response in setup.engine.generate(asked, GREEDY, seed=0, on_progress=note):
            written[response.request_id] = response
        yield {**written}, seen


def test_cache_counts_and_texts_are_right_where_some_wait_and_some_are_set_back(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts, set_back = setup.engine.inspect(), []
    scheduler, runner = parts.scheduler, parts.speculative_runner
    assert runner is not None
    preempt, pool = scheduler._preempt_request, scheduler.kv_cache_manager.block_pool
    monkeypatch.setattr(
        scheduler, "_preempt_request", lambda *args, **rest: set_back.append(1) or preempt(*args, **rest)
    )
    monkeypatch.setattr(parts.controller.alarm, "window", 10**9)
    draw, steps = random.Random(3), itertools.count()  # off and any arm in turn; pieces end while the head is off
    setup.selector.script = lambda state: OFF if next(steps) // 10 % 2 == 0 else draw.choice(setup.selector.all_arms)
    num_free = pool.get_num_free_blocks()
    requests = [Request(id=r.id, prompt_ids=r.prompt_ids, group=r.group, max_tokens=300) for r in siblings()]
    before: dict[int, Response] = {}
    num_pieces = 0
    for written, seen in pieces(setup, requests, num_steps=125):
        num_pieces += 1
        left = len(requests) - sum(not response.is_unfinished for response in before.values())
        new = sum(len(response.token_ids) for response in written.values())
        new -= sum(len(response.token_ids) for response in before.values())
        assert {progress.total for progress in seen} == {left}
        assert all(a.tokens <= b.tokens for a, b in pairwise(seen))
        assert all(a.finished <= b.finished for a, b in pairwise(seen))
        assert seen[0].longest >= max((len(r.token_ids) for r in before.values() if r.is_unfinished), default=0)
        assert seen[-1].finished == left
        assert seen[-1].running == seen[-1].waiting == 0
        assert seen[-1].tokens == new
        assert seen[0].tokens <= left * 4
        # Nothing is left behind: neither cache, nor texts, nor the head's inputs that were put off.
        assert pool.get_num_free_blocks() == num_free
        assert not scheduler.requests
        assert not scheduler.running
        assert not scheduler.waiting
        assert not runner.controller.lookups._texts
        assert not runner.verified
        assert len(runner.catch_up) == 0
        before = written
    assert num_pieces > 2
    assert set_back
    texts = [[*before[request.id].token_ids] for request in requests]
    assert {len(text) for text in texts} == {300}
    assert greedy_gap(setup.policy, [list(request.prompt_ids) for request in requests], texts) < 1e-3
    for response in before.values():
        for (at, _, _, kept), (later, *_) in pairwise(response.drafts):
            assert at + kept + 1 <= later  # drafts do not overlap, over the seams neither
        assert len(response.logps) == 300


def test_of_turns_that_have_ended_nothing_is_kept(setup: Setup) -> None:
    """A run of conversations whose requests stay open has no other end."""
    setup.selector.script = lambda state: OFF
    writer, scheduler, seen = setup.engine._writer, setup.engine.inspect().scheduler, []
    assert writer is not None

    def note(progress: RolloutProgress) -> None:
        seen.append(progress)
        assert {len(writer._before), len(writer._names)} <= {*range(len(scheduler.requests) + 1)}
        assert sum(writer._order._num_open.values()) == len(scheduler.requests)

    turn = Request(id=0, prompt_ids=PROMPTS[0], max_tokens=10)
    written: list[Response] = []
    for response in setup.engine.generate([turn], GREEDY, seed=0, on_progress=note):
        written.append(response)
        if len(written) < 4:
            unfinished = replace(response, finish_reason="unfinished")
            turn = replace(
                turn, id=len(written), group=len(written), written=unfinished, max_tokens=turn.max_tokens + 10
            )
            setup.engine.add([turn])
    assert len(written) == 4
    assert [progress.tokens for progress in seen] == [*range(1, len(seen) + 1)]


def test_a_continued_response_drafts_for_its_siblings_alone(setup: Setup) -> None:
    setup.selector.script = lambda state: Strategy(3, "sibling")
    first = Request(id=0, prompt_ids=PROMPTS[0], max_tokens=80)
    other = Request(id=1, prompt_ids=PROMPTS[0], max_tokens=40)
    written, _ = next(pieces(setup, [first], num_steps=60))
    assert written[0].is_unfinished
    assert len(written[0].token_ids) >= 60
    again = replace(first, written=written[0])
    for request in (other, replace(other, prompt_ids=PROMPTS[1])):
        found = {r.request_id: r for r in setup.engine.generate([again, request], GREEDY, seed=0)}
        assert (found[1].num_kept.get("sibling", 0) > 20) is (request is other)


@pytest.mark.parametrize("draws_by_position", [False, True])
def test_a_continued_response_has_new_noise_unless_noise_goes_by_position(
    setup: Setup, draws_by_position: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The V2 runner would be given the same."""
    writer, seeds = setup.engine._writer, []
    assert writer is not None
    assert writer._draws_by_position is internals.runs_v2()
    monkeypatch.setattr(writer, "_draws_by_position", draws_by_position)
    request, scheduler = Request(id=0, prompt_ids=[5], max_tokens=9, seed=17), setup.engine.inspect().scheduler
    for written in (None, Response(0, [6], [-1.0], "unfinished", (0,))):
        for _ in setup.engine.generate(
            [replace(request, written=written)],
            GREEDY,
            seed=0,
            on_progress=lambda _: seeds.extend(each.sampling_params.seed for each in scheduler.running),
        ):
            pass
    assert set(seeds[:5]) == {17}
    assert (seeds[-1] == 17) is draws_by_position


def test_the_alarm_counts_on_over_stops(setup: Setup, caplog: pytest.LogCaptureFixture) -> None:
    dead = {name: tensor.clone() for name, tensor in setup.head.items()}
    dead["lm_head.weight"][:] = 0
    dead["lm_head.weight"][1] = -1e3 * dead["norm.weight"].sign()  # whatever it reads, it says 0 or 1, never written
    setup.selector.script = lambda state: Strategy(3, "learned")
    controller = setup.engine.inspect().controller
    assert controller is not None
    alarm = controller.alarm
    window, alarm.window = alarm.window, 40
    try:
        setup.engine.update_drafter(dead.items(), 3)
        rung, verified = [], []
        with caplog.at_level(logging.WARNING):
            for _, seen in itertools.islice(pieces(setup, siblings(1), num_steps=5), 4):
                verified.append(sum(v for v, _ in alarm._steps))
                rung.append(alarm.is_ringing)
                assert len(seen) <= 6
        assert rung[0] is False, "a piece alone is too short to tell"
        assert rung[-1] is True
        assert caplog.text.count("The draft head is switched off") == 1
        assert verified[0] <= 4 * 5
        assert setup.engine.stats()["speculation/off_share"] == 1
    finally:
        alarm.window, alarm.num_rung = window, 0
        setup.engine.update_drafter(setup.head.items(), 4)


def test_a_stop_within_a_draft_takes_whole_tokens_alone(setup: Setup) -> None:
    """Stopped after every step, with drafts under way: nothing unverified comes back."""
    setup.selector.script = lambda state: Strategy(3, "mixed")
    requests = [replace(request, max_tokens=12) for request in siblings(2)]
    responses = write_in_pieces(setup.engine, requests, GREEDY, num_steps=2)
    texts = [[*response.token_ids] for response in responses]
    assert greedy_gap(setup.policy, [list(request.prompt_ids) for request in requests], texts) < 1e-3
