"""New weights while requests run: every token has the log-prob of the weights that wrote it, after the right cache."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache

from tests.support.drafters.eagle_head import make_head, save_head
from tests.support.speculation_engines import PROMPTS, ScriptedSelector, save_endless_policy
from tlt_lightning.engine import RolloutProgress, VLLMEngine
from tlt_lightning.engine.vllm.speculation import Speculation, speculation_args
from tlt_lightning.policy import PolicyWeights, load_policy
from tlt_lightning.rollout import Request, Response, Sampling
from tlt_lightning.speculation.strategy import Strategy

pytestmark = pytest.mark.vllm

BLOCK = 32
SAMPLING = Sampling(max_tokens=50)
LONG = [token for prompt in (*PROMPTS, *PROMPTS) for token in prompt]
"""A prompt of 40 tokens, longer than a block."""

Cuts = Sequence[tuple[int, int]]
"""Number of a policy, and how many tokens there were when it ended."""


class SmallBlocks(VLLMEngine):
    """Shares prefixes of a few tokens: a CPU's blocks hold 128. Reads `chunk` tokens of prompts in a step."""

    chunk: int | None = None

    def _engine_args(self, *args: Any) -> Any:
        found = super()._engine_args(*args)
        found.block_size, found.max_num_batched_tokens = BLOCK, self.chunk
        return found


@dataclass
class Setup:
    """A live engine, and policies that it is given in turn."""

    engine: VLLMEngine
    policies: list[nn.Module]
    speculative: str
    seen: list[RolloutProgress] = field(default_factory=list)

    @property
    def keeps(self) -> bool:
        return self.engine.kv_on_update == "keep"

    @property
    def scheduler(self) -> Any:
        return self.engine.inspect().scheduler

    def push(self, version: int) -> None:
        self.engine.update_weights(PolicyWeights(self.policies[version % len(self.policies)]), version)

    def write(
        self, requests: Sequence[Request], updates: dict[int, Callable[[], Any]], sampling: Sampling = SAMPLING
    ) -> dict[int, Response]:
        """The responses by id; `updates` are called after so many steps."""
        found: dict[int, Response] = {}
        self.seen = []

        def on_progress(progress: RolloutProgress) -> None:
            self.seen.append(progress)
            updates.get(len(self.seen), lambda: None)()

        for response in self.engine.generate(requests, sampling, seed=0, on_progress=on_progress):
            assert response.request_id not in found
            found[response.request_id] = response
        assert all(earlier.tokens <= later.tokens for earlier, later in pairwise(self.seen))
        written = sum(len(each.written.token_ids) for each in requests if each.written is not None)
        assert self.seen[-1].tokens == sum(len(response.token_ids) for response in found.values()) - written
        return found

    def logps(self, response: Response, prompt: Sequence[int], cuts: Cuts) -> Tensor:
        """Log-probs of a response, (T,), by policies of which each goes on with the cache that those before it filled.

        With n tokens written when the weights change, the old ones have filled the cache up to the last but one of
        them: the last one's keys, and the distribution of the next, are the new ones'.
        """
        ids, cache, rows, start = torch.tensor([[*prompt, *response.token_ids]]), DynamicCache(), [], 0
        for number, end in cuts:
            read = ids[:, start : max(start, len(prompt) + end - 1)]
            if read.shape[1]:
                with torch.no_grad():
                    rows.append(self.policies[number](input_ids=read, past_key_values=cache, use_cache=True).logits[0])
            start += read.shape[1]
        logps = torch.cat(rows)[len(prompt) - 1 :].float().log_softmax(-1)
        return logps.gather(1, torch.tensor(response.token_ids)[:, None])[:, 0]

    def expected(self, response: Response, prompt: Sequence[int], shift: int = 0, keeps: bool | None = None) -> Tensor:
        """Log-probs that a response should have; with `shift`, had the weights changed so many tokens later."""
        ends = [*accumulate(count for _, count in response.segments)]
        cuts = [
            (version % len(self.policies), end + shift * (end < ends[-1]))
            for (version, _), end in zip(response.segments, ends, strict=True)
        ]
        if self.keeps if keeps is None else keeps:
            return self.logps(response, prompt, cuts)
        whole = [self.logps(response, prompt, [(number, ends[-1])]) for number, _ in cuts]
        starts = [0, *(end for _, end in cuts)]
        return torch.cat([row[at:end] for row, at, (_, end) in zip(whole, starts, cuts, strict=False)])

    def check(self, requests: Sequence[Request], found: dict[int, Response]) -> None:
        for request in requests:
            response, prompt = found[request.id], request.prompt_ids
            assert sum(count for _, count in response.segments) == len(response.token_ids)
            assert differs(response, self.expected(response, prompt)) < 1e-4
            for shift in (-1, 1) if min(response.version_tokens, default=0) > 1 else ():
                assert differs(response, self.expected(response, prompt, shift)) > 1e-3


def differs(response: Response, logps: Tensor) -> float:
    return float((torch.tensor(response.logps) - logps).abs().max())


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    policy = save_endless_policy(tmp_path_factory.mktemp("policy"))
    return policy, save_head(make_head(policy, seed=3), tmp_path_factory.mktemp("head"))


def start(
    paths: tuple[str, str],
    kv_on_update: Literal["keep", "recompute"],
    *,
    speculative: str = "",
    is_async: bool = False,
    chunk: int | None = None,
    kv_cache_gib: float = 0.0625,
) -> Setup:
    """A live engine; asynchronous as on a GPU where wanted, which vLLM's CPU build is not by itself."""
    from vllm.platforms import current_platform

    from tlt_lightning.engine.vllm import engine as vllm_engine
    from tlt_lightning.engine.vllm.scheduler import SteeredAsyncScheduler

    path, head = paths
    speculation = None
    if speculative:
        drafter: Any = speculative
        selector = ScriptedSelector((drafter,), longest=4)
        selector.script = lambda state: Strategy(4, drafter)
        speculation = Speculation(
            selector=selector,
            head=head if drafter == "learned" else None,
            ngram=drafter == "ngram",
            max_draft_tokens=4,
            draft_sampling="probabilistic",
            steps_per_choice=1,
        )
    engine = SmallBlocks(
        dtype="float32",
        kv_cache_gib=kv_cache_gib,
        max_num_seqs=8,
        enforce_eager=True,
        sleep=False,
        kv_on_update=kv_on_update,
        speculation=speculation,
    )
    engine.chunk = chunk
    check = current_platform.check_and_update_config

    def check_and_schedule_ahead(config: Any) -> None:
        check(config)
        config.scheduler_config.async_scheduling = is_async

    def ahead(*args: Any, **settings: Any) -> dict[str, Any]:
        return {**speculation_args(*args, **settings), "scheduler_cls": SteeredAsyncScheduler, "async_scheduling": True}

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(current_platform, "check_and_update_config", check_and_schedule_ahead)
        if is_async:
            monkeypatch.setattr(vllm_engine, "speculation_args", ahead)
        engine.setup(path, max_model_len=192, seed=0)
    return Setup(engine, [changed(path, seed) for seed in range(3)], speculative)


def changed(path: str, seed: int) -> nn.Module:
    """The saved policy, with noise of 15% unless `seed` is 0."""
    policy = load_policy(path)
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.parameters():
            size = 0.15 * float(parameter.std()) if seed else 0.0
            parameter.add_(size * torch.randn(parameter.shape, generator=noise))
    return policy


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((kv, speculative, is_async), id=f"{kv}-{speculative or 'plain'}-{'async' if is_async else 'sync'}")
        for kv in ("keep", "recompute")
        for speculative, is_async in (("", False), ("", True), ("ngram", False), ("learned", False), ("learned", True))
    ],
)
def setup(request: pytest.FixtureRequest, paths: tuple[str, str]) -> Iterator[Setup]:
    kv_on_update, speculative, is_async = request.param
    found = start(paths, kv_on_update, speculative=speculative, is_async=is_async)
    yield found
    found.engine.close()


@pytest.fixture(params=["keep", "recompute"])
def started(request: pytest.FixtureRequest, paths: tuple[str, str]) -> Iterator[Callable[..., Setup]]:
    """Starts an engine of one's own."""
    found: list[Setup] = []

    def make(**settings: Any) -> Setup:
        found.append(start(paths, request.param, **settings))
        return found[0]

    yield make
    found[0].engine.close()


def asked(num: int = 6, prompts: Sequence[Sequence[int]] = PROMPTS, **settings: Any) -> list[Request]:
    return [
        Request(id=i, prompt_ids=prompts[i % len(prompts)], group=i % len(prompts), seed=100 + i, **settings)
        for i in range(num)
    ]


def test_every_token_has_the_log_prob_of_the_weights_that_wrote_it(setup: Setup) -> None:
    setup.push(0)
    requests = asked()
    found = setup.write(requests, {9: lambda: setup.push(1), 14: lambda: setup.push(2)})
    assert sum(response.policy_versions == (0, 1, 2) for response in found.values()) > 3
    assert any(response.drafts for response in found.values()) is bool(setup.speculative)
    setup.check(requests, found)


def test_the_same_weights_again_change_no_text(setup: Setup) -> None:
    """Whoever reads anew goes on with its own noise, and drafts change nothing at temperature 0."""
    sampling = replace(SAMPLING, temperature=0 if setup.speculative else 1)
    setup.push(0)
    plain = setup.write(asked(), {}, sampling)
    again = setup.write(asked(), {4: lambda: setup.push(3), 11: lambda: setup.push(6)}, sampling)
    assert {number: response.token_ids for number, response in again.items()} == {
        number: response.token_ids for number, response in plain.items()
    }
    assert sum(response.policy_versions == (0, 3, 6) for response in again.values()) > 3


def test_who_begins_after_an_update_reads_its_prompt_with_the_new_weights(setup: Setup) -> None:
    """Of one prompt some run, some wait and some come only then: the cache holds what old weights made of it."""
    setup.push(0)
    *requests, late = asked(11, [LONG])

    def push() -> None:
        assert setup.scheduler.waiting
        setup.push(1)
        setup.push(2)
        setup.engine.add([late])

    found = setup.write(requests, {4: push})
    assert {each.policy_versions for each in found.values()} >= {(0, 2), (2,)}
    assert found[late.id].policy_versions == (2,)
    setup.check([*requests, late], found)


def test_updates_between_all_steps_leave_every_response_whole(setup: Setup) -> None:
    """Some end in the step that an update cuts short; what is stopped right after one has no empty segment.

    Each begins the counts of drafts anew, and of whom has ended none are kept: a run may have no other end.
    """
    requests = [replace(each, max_tokens=1 + 2 * each.id) for each in asked(8)]
    setup.push(0)
    runner = setup.engine.inspect().speculative_runner

    def push(step: int) -> None:
        setup.push(step)
        if runner is not None:
            assert runner.controller.counters.decode_steps == 0
            assert len(runner.verified_for) == len(setup.scheduler.requests)
            assert runner.verified.keys() <= setup.scheduler.requests.keys() | setup.scheduler.finished_req_ids
        if step == 9:
            setup.engine.stop([7])

    found = setup.write(requests, {step: lambda step=step: push(step) for step in range(1, 40)})
    assert found[7].is_unfinished
    assert len(found[7].policy_versions) > 2
    assert all(min(each.version_tokens, default=1) for each in found.values())
    setup.check(requests, found)


def test_weights_come_between_two_responses_and_a_continued_one_has_all_its_segments(setup: Setup) -> None:
    requests = [replace(each, max_tokens=50 if each.id else 6) for each in asked(4)]
    setup.push(0)
    before = {}
    for response in setup.engine.generate(requests, SAMPLING, seed=0):
        before[response.request_id] = response
        setup.engine.stop([each.id for each in requests])
    setup.push(1)
    again = [replace(each, written=before[each.id]) for each in requests if before[each.id].is_unfinished]
    found = setup.write([replace(each, seed=each.seed) for each in again], {6: lambda: setup.push(2)})
    assert [response.policy_versions for response in found.values()].count((0, 1, 2)) > 1
    for request in again:
        response, written = found[request.id], len(before[request.id].token_ids)
        late = replace(
            response,
            policy_versions=response.policy_versions[1:],
            version_tokens=(written + response.version_tokens[1], *response.version_tokens[2:]),
        )
        assert (
            differs(
                response,
                torch.cat(
                    [
                        setup.logps(response, request.prompt_ids, [(0, len(response.token_ids))])[:written],
                        setup.expected(late, request.prompt_ids)[written:],
                    ]
                ),
            )
            < 1e-4
        )


def test_of_a_rollout_that_was_given_up_the_next_one_keeps_nothing(setup: Setup) -> None:
    """A run that failed may go on in the same engine, with the same requests."""
    requests, greedy = [replace(each, max_tokens=50 if each.id else 12) for each in asked(4)], Sampling(temperature=0)
    setup.push(0)
    updates = iter([lambda: None, lambda: setup.push(1)])
    given_up = setup.engine.generate(requests, greedy, seed=0, on_progress=lambda _: next(updates, bool)())
    assert next(given_up).policy_versions == (0, 1)
    given_up.close()
    setup.push(2)
    found = setup.write(requests, {})
    assert {response.policy_versions for response in found.values()} == {(2,)}
    setup.check(requests, found)


def test_weights_that_come_within_a_prompt_read_the_rest_of_it(started: Callable[..., Setup]) -> None:
    setup = started(chunk=BLOCK)
    requests = asked(2, [LONG])
    setup.push(0)

    def push() -> None:
        assert [each.num_computed_tokens for each in setup.scheduler.running] == [BLOCK]
        setup.push(1)

    found = setup.write(requests, {1: push})
    assert {each.policy_versions for each in found.values()} == {(1,)}
    for request in requests:
        read_before = BLOCK + 1 - len(LONG)  # as tokens of a response, which has none yet
        cuts = [(0, read_before), (1, 50)] if setup.keeps and request.id == 0 else [(1, 50)]
        assert differs(found[request.id], setup.logps(found[request.id], LONG, cuts)) < 1e-4
    if setup.keeps:
        assert differs(found[0], setup.logps(found[0], LONG, [(1, 50)])) > 1e-3


def test_long_texts_that_are_read_anew_in_parts_go_on_with_their_noise(started: Callable[..., Setup]) -> None:
    setup = started(chunk=BLOCK)
    setup.push(0)
    plain = setup.write(asked(3, [LONG]), {})
    again = setup.write(asked(3, [LONG]), {20: lambda: setup.push(3)})
    assert [again[i].token_ids for i in range(3)] == [plain[i].token_ids for i in range(3)]


def test_requests_that_are_set_back_meanwhile_read_all_with_the_new_weights(started: Callable[..., Setup]) -> None:
    setup = started(kv_cache_gib=11 * BLOCK * 2**10 / 2**30)
    prompt, set_back = [*LONG, *LONG[:20]], list[int]()  # two blocks, of which all share one
    requests = asked(8, [prompt])
    setup.push(0)

    def push() -> None:
        waiting = [int(each.request_id.split("-")[0]) for each in setup.scheduler.waiting if each.num_preemptions]
        if waiting and not set_back:
            set_back.extend(waiting)
            setup.push(1)

    found = setup.write(requests, dict.fromkeys(range(1, 99), push))
    assert set_back
    for number in set_back:
        assert found[number].policy_versions == (0, 1)
        assert differs(found[number], setup.expected(found[number], prompt, keeps=False)) < 1e-4
