"""Greedy text is the same to the token with every drafter, however the strategy changes from step to step."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import pytest

from tests.conftest import WORDS, save_policy
from tests.support.drafters.eagle_head import make_head, save_head
from tests.support.speculation_engines import (
    GREEDY,
    PROMPTS,
    ScriptedSelector,
    engine_of,
    greedy_texts,
    save_endless_policy,
    save_trained_head,
    siblings,
    write,
    write_in_pieces,
)
from tlt_lightning.engine import VLLMEngine
from tlt_lightning.engine.vllm.speculation import Speculation
from tlt_lightning.rollout import Request, Sampling
from tlt_lightning.speculation.strategy import OFF, Drafter, Strategy

pytestmark = pytest.mark.vllm

CASES: dict[str, dict[str, Any]] = {
    "qwen2, all drafters": {"architecture": "qwen2", "head": "trained", "siblings": True, "ngram": True},
    "qwen2, random head": {"architecture": "qwen2", "head": "random"},
    "llama, trained head": {"architecture": "llama", "head": "trained"},
    "llama, no head": {"architecture": "llama", "siblings": True, "ngram": True},
}


class Setup(NamedTuple):
    engine: VLLMEngine
    selector: ScriptedSelector
    texts: list[list[int]]
    name: str


@pytest.fixture(scope="module", params=list(CASES))
def setup(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    case = dict(CASES[request.param])
    path = tmp_path_factory.mktemp("greedy")
    policy = save_endless_policy(path / "policy", case.pop("architecture"))
    head = case.pop("head", None)
    if head == "trained":
        case["head"] = save_trained_head(policy, path / "head")
    elif head == "random":
        case["head"] = save_head(make_head(policy), path / "head")
    drafters: list[Drafter] = ["learned"] if head else []
    drafters += ["sibling", "ngram"] if case.get("siblings") else []
    drafters += ["mixed"] if {"head", "siblings"} <= case.keys() else []
    selector = ScriptedSelector(tuple(drafters))
    speculation = Speculation(selector=selector, max_draft_tokens=5, steps_per_choice=1, **case)
    with engine_of(policy, speculation) as engine:
        yield Setup(engine, selector, [text[len(PROMPTS[0]) :] for text in greedy_texts(policy, 64)], request.param)


def expected(setup: Setup, requests: list[Request]) -> list[list[int]]:
    return [setup.texts[request.group][: request.max_tokens] for request in requests]


def test_strategies_change_every_step(setup: Setup) -> None:
    setup.selector.at_random(0)
    assert write(setup.engine, siblings()) == expected(setup, siblings())
    assert setup.engine.stats()["speculation/switches"] > 4


def test_every_drafter_at_its_longest(setup: Setup) -> None:
    for drafter in {arm.drafter for arm in setup.selector.all_arms if not arm.is_off}:
        setup.selector.script = lambda state, drafter=drafter: Strategy(5, drafter)
        assert write(setup.engine, siblings()) == expected(setup, siblings())
        if "random" not in setup.name:  # greedy text hardly repeats itself
            assert setup.engine.stats()["speculation/acceptance_length"] > (1.05 if drafter == "ngram" else 1.5), (
                drafter
            )


def test_off_and_on_again(setup: Setup) -> None:
    setup.selector.off_and_on(next(arm for arm in setup.selector.all_arms if arm.num_draft_tokens == 4), steps=7)
    assert write(setup.engine, siblings()) == expected(setup, siblings())


def test_off_is_plain_decoding(setup: Setup) -> None:
    setup.selector.script = lambda state: OFF
    assert write(setup.engine, siblings()) == expected(setup, siblings())
    stats = setup.engine.stats()
    assert (stats["speculation/off_share"], stats["speculation/k_mean"]) == (1, 0)
    assert stats["speculation/acceptance_length"] == 1


def test_responses_say_which_of_their_tokens_were_drafted_and_by_whom(setup: Setup) -> None:
    steps: list[tuple[int, tuple[int, ...], tuple[int, ...]]] = []  # tokens before, drafts, tokens emitted
    runner: Any = setup.engine.inspect().speculative_runner
    after_step = runner.after_step

    def spy(scheduler: Any, output: Any, result: Any) -> None:
        for request_id, drafts in output.scheduled_spec_decode_tokens.items():
            tokens = result.sampled_token_ids[result.req_id_to_index[request_id]]
            steps.append((scheduler.requests[request_id].num_output_tokens, tuple(drafts), tuple(tokens)))
        after_step(scheduler, output, result)

    setup.selector.at_random(1)
    runner.after_step = spy
    try:
        responses = list(setup.engine.generate(siblings(), GREEDY, seed=0))
    finally:
        runner.after_step = after_step
    told = [draft for response in responses for draft in response.drafts]
    assert sorted(draft[::2] for draft in told) == sorted((at, len(drafts)) for at, drafts, _ in steps)
    assert sum(kept for *_, kept in told) == sum(len(tokens) - 1 for *_, tokens in steps)
    assert {who for _, who, *_ in told} <= {arm.drafter for arm in setup.selector.all_arms} - {"mixed"}
    texts = {(at, *drafts) for at, drafts, _ in steps}
    for response in responses:
        for at, _, drafted, kept in response.drafts:
            beginning = (at, *response.token_ids[at : at + kept])
            assert any(len(text) == 1 + drafted and text[: len(beginning)] == beginning for text in texts)
        for (at, *_, kept), (following, *_) in pairwise(response.drafts):
            assert at + kept + 1 <= following


def test_responses_stopped_and_continued_are_those_written_at_once(setup: Setup) -> None:
    setup.selector.at_random(2)
    responses = write_in_pieces(setup.engine, siblings(), GREEDY, num_steps=7)
    assert [list(response.token_ids) for response in responses] == expected(setup, siblings())
    for response in responses:
        assert len(response.logps) == len(response.token_ids)
        for (at, *_, kept), (following, *_) in pairwise(response.drafts):
            assert at + kept + 1 <= following < len(response.token_ids)
    if "random" not in setup.name:
        assert sum(sum(response.num_kept.values()) for response in responses) > len(responses)


def test_limits_and_stops_inside_accepted_drafts(setup: Setup) -> None:
    emitted: list[list[int]] = []
    runner: Any = setup.engine.inspect().speculative_runner
    after_step = runner.after_step

    def spy(scheduler: Any, output: Any, result: Any) -> None:
        emitted.extend(list(tokens) for tokens in result.sampled_token_ids)
        after_step(scheduler, output, result)

    drafters = {arm.drafter for arm in setup.selector.all_arms if not arm.is_off}
    drafter: Drafter = next(name for name in ("mixed", "sibling", "learned") if name in drafters)
    setup.selector.script = lambda state: Strategy(5, drafter)
    runner.after_step = spy
    try:
        requests = [Request(id=i, prompt_ids=PROMPTS[0], max_tokens=20 + i) for i in range(8)]
        assert write(setup.engine, requests) == [setup.texts[0][: 20 + i] for i in range(8)]
        stops_inside = 0
        for stop in setup.texts[0][20:32:2]:
            end = setup.texts[0].index(stop) + 1
            emitted.clear()
            requests = [Request(id=i, prompt_ids=PROMPTS[0]) for i in range(10)]
            sampling = Sampling(max_tokens=64, temperature=0, stop_token_ids=(stop,))
            assert write(setup.engine, requests, sampling) == [setup.texts[0][:end]] * 10
            stops_inside += any(stop in tokens[1:-1] for tokens in emitted)
        words = [WORDS[token] for token in setup.texts[0]]
        for string in (f"{words[at]} {words[at + 1]}" for at in (20, 25, 30)):
            end = next(n for n in range(1, 65) if string in " ".join(words[:n]))
            sampling = Sampling(max_tokens=64, temperature=0, stop_strings=(string,))
            assert write(setup.engine, requests, sampling) == [setup.texts[0][:end]] * 10
    finally:
        runner.after_step = after_step
    assert stops_inside or "random" in setup.name  # in the middle of an accepted run


def test_the_end_of_sequence_inside_accepted_drafts(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("ends")
    policy = str(save_policy(path / "policy", num_hidden_layers=4))
    texts = [text[len(PROMPTS[0]) :] for text in greedy_texts(policy, 64)]
    group = next(index for index, text in enumerate(texts) if 1 in text[4:])
    end = texts[group].index(1) + 1
    selector = ScriptedSelector(("sibling",))
    selector.script = lambda state: Strategy(5, "sibling")
    requests = [Request(id=i, prompt_ids=PROMPTS[group]) for i in range(6)]
    with engine_of(policy, Speculation(selector=selector, siblings=True), max_num_seqs=2) as engine:
        assert write(engine, requests, GREEDY) == [texts[group][:end]] * 6
        assert engine.stats()["speculation/acceptance_length"] > 2
