"""Duties of every engine, run on both with the same tiny policy."""

import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tlt_lightning.engine import RolloutEngine, TransformersEngine, VLLMEngine
from tlt_lightning.engine.base import RolloutProgress
from tlt_lightning.policy import PolicyWeights, load_policy, load_tokenizer
from tlt_lightning.rollout import Request, Response, Sampling
from tlt_lightning.testing.engines import DUTIES, MAX_MODEL_LEN, EngineCase

PROMPTS = [[12, 13, 3, 15, 4], [14, 13, 3, 17, 4], [12, 12, 12, 3, 19, 4]]
WRITTEN = Response(0, [3, 4], [-1.0, -1.0], "unfinished", (0,))
# vLLM's attention for GPUs multiplies float32 numbers as TF32.
TOLERANCE = 5e-3 if torch.cuda.is_available() else 1e-4


@pytest.fixture(scope="module", params=["transformers", pytest.param("vllm", marks=pytest.mark.vllm)])
def case(request: pytest.FixtureRequest, policy_path: str) -> Iterator[EngineCase]:
    if request.param == "vllm":
        engine: RolloutEngine = VLLMEngine(dtype="float32", kv_cache_gib=0.0625, max_num_seqs=8, enforce_eager=True)
    else:
        engine = TransformersEngine(batch_size=4)
    yield EngineCase(engine, policy_path)
    engine.close()


@pytest.fixture
def engine(case: EngineCase) -> RolloutEngine:
    return case.engine


@pytest.fixture
def policy(engine: RolloutEngine, policy_path: str) -> torch.nn.Module:
    """The saved policy, pushed into the engine as version 0."""
    model = load_policy(policy_path)
    engine.attach(model)
    engine.update_weights(PolicyWeights(model), 0)
    return model


@pytest.mark.parametrize("duty", DUTIES)
def test_duty(duty: Callable[[EngineCase], None], case: EngineCase, policy: torch.nn.Module) -> None:
    duty(case)


def requests(num_siblings: int = 4) -> list[Request]:
    pairs = [(group, prompt) for group, prompt in enumerate(PROMPTS) for _ in range(num_siblings)]
    return [Request(id=i, prompt_ids=prompt, group=group) for i, (group, prompt) in enumerate(pairs)]


def run(engine: RolloutEngine, sampling: Sampling, seed: int = 0) -> list[tuple[list[int], list[float], str]]:
    responses = sorted(engine.generate(requests(), sampling, seed=seed), key=lambda response: response.request_id)
    assert [response.request_id for response in responses] == list(range(len(requests())))
    return [(list(r.token_ids), list(r.logps), r.finish_reason) for r in responses]


def greedy_by_hand(policy: torch.nn.Module, prompt: list[int], max_tokens: int) -> list[int]:
    ids = torch.tensor([prompt])
    for _ in range(max_tokens):
        with torch.no_grad():
            token = policy(input_ids=ids).logits[0, -1].argmax()
        ids = torch.cat([ids, token.view(1, 1)], 1)
        if token == 1:
            break
    return ids[0, len(prompt) :].tolist()


def test_greedy_is_the_argmax_of_the_policy(engine: RolloutEngine, policy: torch.nn.Module) -> None:
    for (tokens, _, _), request in zip(run(engine, Sampling(max_tokens=24, temperature=0)), requests(), strict=True):
        assert tokens == greedy_by_hand(policy, list(request.prompt_ids), 24)


def test_top_k_logps_are_renormalised(engine: RolloutEngine, policy: torch.nn.Module) -> None:
    tokens, logps, _ = run(engine, Sampling(max_tokens=1, top_k=2))[0]
    with torch.no_grad():
        logits = policy(input_ids=torch.tensor([PROMPTS[0]])).logits[0, -1]
    kept = logits.topk(2)
    expected = kept.values.log_softmax(-1)[kept.indices.tolist().index(tokens[0])]
    assert logps[0] == pytest.approx(expected.item(), abs=TOLERANCE)


def test_stop_tokens_end_a_response(engine: RolloutEngine, policy: torch.nn.Module) -> None:
    greedy = greedy_by_hand(policy, PROMPTS[0], 24)
    stop = greedy[2]
    tokens, _, reason = run(engine, Sampling(max_tokens=24, temperature=0, stop_token_ids=(stop,)))[0]
    assert tokens == greedy[: greedy.index(stop) + 1]
    assert reason == "stop"
    for beyond in (-5, 10**6):
        with pytest.raises(ValueError, match=rf"token {beyond} in `stop_token_ids`, and"):
            run(engine, Sampling(max_tokens=4, stop_token_ids=(stop, beyond)))


def test_min_p_keeps_likely_tokens_and_renormalises(engine: RolloutEngine, policy: torch.nn.Module) -> None:
    many = [Request(id=i, prompt_ids=PROMPTS[0]) for i in range(24)]
    responses = list(engine.generate(many, Sampling(max_tokens=1, min_p=0.3), seed=0))
    with torch.no_grad():
        logps = policy(input_ids=torch.tensor([PROMPTS[0]])).logits[0, -1].log_softmax(-1)
    kept = logps >= logps.max() + np.log(0.3)
    expected = logps.masked_fill(~kept, -torch.inf).log_softmax(-1)
    assert 1 < kept.sum() < 20
    assert {response.token_ids[0] for response in responses} <= set(kept.nonzero().flatten().tolist())
    for response in responses:
        assert response.logps[0] == pytest.approx(expected[response.token_ids[0]].item(), abs=TOLERANCE)


def test_no_end_comes_before_min_tokens(engine: RolloutEngine, policy: torch.nn.Module) -> None:
    sampling = {"max_tokens": 24, "stop_token_ids": tuple(range(12, 22))}  # nearly every text ends at once
    assert min(len(tokens) for tokens, _, _ in run(engine, Sampling(**sampling))) < 5
    ended = run(engine, Sampling(**sampling, min_tokens=5))
    for tokens, logps, _ in ended:
        assert len(tokens) == len(logps) >= 5
        assert not {1, *range(12, 22)} & set(tokens[:4])
    first = policy(input_ids=torch.tensor([PROMPTS[0]])).logits[0, -1].detach()
    first[[1, *range(12, 22)]] = -torch.inf  # the log-prob is that of what was sampled from
    tokens, logps, _ = ended[0]
    assert logps[0] == pytest.approx(first.log_softmax(-1)[tokens[0]].item(), abs=TOLERANCE)


def test_a_stop_string_of_two_tokens_ends_a_response(
    engine: RolloutEngine, policy: torch.nn.Module, policy_path: str
) -> None:
    decode = load_tokenizer(policy_path).decode
    whole = greedy_by_hand(policy, PROMPTS[0], 24)
    greedy = {"max_tokens": 24, "temperature": 0}
    stop = decode(whole[2:4])
    end = next(n for n in range(1, 25) if stop in decode(whole[:n]))
    tokens, logps, reason = run(engine, Sampling(**greedy, stop_strings=("nowhere", stop)))[0]
    assert (tokens, reason, len(logps)) == (whole[:end], "stop", end)
    tokens, logps, _ = run(engine, Sampling(**greedy, stop_strings=(stop,), min_tokens=end))[0]
    assert len(tokens) == len(logps) > end


def draw(*_: object) -> tuple[float, float, float]:
    """One number of each of the process's generators."""
    return torch.rand(1).item(), random.random(), float(np.random.rand())


def test_draws_of_callbacks_and_consumers_change_no_response(engine: RolloutEngine, policy: torch.nn.Module) -> None:
    expected = run(engine, Sampling(max_tokens=16), seed=3)
    written = {}
    for response in engine.generate(requests(), Sampling(max_tokens=16), seed=3, on_progress=draw):
        draw()
        written[response.request_id] = list(response.token_ids)
    assert [written[number] for number in sorted(written)] == [tokens for tokens, _, _ in expected]


@pytest.mark.parametrize("end", ["by itself", "by the caller", "by an error"])
def test_however_a_rollout_ends_engine_and_random_numbers_are_as_before(
    engine: RolloutEngine, policy: torch.nn.Module, end: str
) -> None:
    def seed() -> None:
        torch.manual_seed(5), random.seed(5), np.random.seed(5)

    def on_progress(progress: RolloutProgress) -> None:
        if end == "by an error":
            raise KeyError("the callback's")

    expected = run(engine, Sampling(max_tokens=16, temperature=0))
    seed()
    numbers = draw()
    seed()
    stream = engine.generate(requests(), Sampling(max_tokens=16), seed=1, on_progress=on_progress)
    with pytest.raises(KeyError, match="the callback's") if end == "by an error" else nullcontext():
        for _ in stream:
            if end == "by the caller":
                stream.close()
    assert draw() == numbers
    assert run(engine, Sampling(max_tokens=16, temperature=0)) == expected


def test_progress_counts_the_tokens_of_this_rollout_alone(engine: RolloutEngine, policy: torch.nn.Module) -> None:
    asked, seen = [replace(request, written=WRITTEN) for request in requests()], []  # not all of them run at once
    responses = list(engine.generate(asked, Sampling(max_tokens=16), seed=0, on_progress=seen.append))
    new = [len(response.token_ids) - len(WRITTEN.token_ids) for response in responses]
    assert seen[-1].tokens == sum(new)
    assert [p.tokens for p in seen] == sorted(p.tokens for p in seen)
    assert 0 < seen[0].tokens <= sum(sorted(new)[-(seen[0].running + seen[0].finished) :])
    assert seen[-1].longest == max(new) + len(WRITTEN.token_ids)


def stopped_after_first(engine: RolloutEngine, asked: list[Request], **sampling: Any) -> list[Response]:
    """Stop all others once the first response is there."""
    responses = []
    for response in engine.generate(asked, Sampling(max_tokens=24, **sampling), seed=0):
        if not responses:
            engine.stop([request.id for request in asked])
        responses.append(response)
    return sorted(responses, key=lambda response: response.request_id)


def uneven() -> list[Request]:
    """One short response; the others have prompts of another length, so that no engine writes them with it."""
    short = Request(id=0, prompt_ids=PROMPTS[0], max_tokens=3)
    return [short, *(Request(id=i, prompt_ids=PROMPTS[2], group=1) for i in range(1, 5))]


def test_a_stopped_response_is_continued_to_what_it_would_have_been(
    engine: RolloutEngine, policy: torch.nn.Module
) -> None:
    stopped = stopped_after_first(engine, uneven(), temperature=0)
    assert [response.is_unfinished for response in stopped] == [False, True, True, True, True]
    assert all(len(response.token_ids) == len(response.logps) < 24 for response in stopped[1:])
    rest = [replace(request, written=stopped[request.id]) for request in uneven()[1:]]
    engine.update_weights(PolicyWeights(policy), 1)  # the cache is rebuilt
    seen: list[RolloutProgress] = []
    whole = list(engine.generate(rest, Sampling(max_tokens=24, temperature=0), seed=0, on_progress=seen.append))
    expected = greedy_by_hand(policy, PROMPTS[2], 24)
    for response in whole:
        before = stopped[response.request_id]
        assert response.token_ids == expected
        assert list(response.logps[: len(before.logps)]) == list(before.logps)
        start = len(before.token_ids)  # 0 where it had not begun: then none of it is older
        assert response.segments == (*(((0, start),) if start else ()), (1, len(expected) - start))
    assert seen[-1].longest == len(expected)


def test_logps_of_a_continued_response_are_those_of_its_distribution(
    engine: RolloutEngine, policy: torch.nn.Module
) -> None:
    stopped = stopped_after_first(engine, uneven())
    rest = [replace(request, written=stopped[request.id]) for request in uneven()[1:]]
    for response in engine.generate(rest, Sampling(max_tokens=24, min_tokens=20), seed=1):
        ids = torch.tensor([[*PROMPTS[2], *response.token_ids]])
        with torch.no_grad():
            logits = policy(input_ids=ids).logits[0, len(PROMPTS[2]) - 1 : -1].clone()
        start = len(stopped[response.request_id].token_ids)
        logits[start : max(start, 20), 1] = -torch.inf  # where `min_tokens` of the whole response forbids the end
        expected = logits.log_softmax(-1).gather(-1, torch.tensor(response.token_ids)[:, None]).squeeze(-1)
        assert 20 < len(response.token_ids) == len(response.logps) <= 24
        assert response.segments == ((0, len(response.token_ids)),)  # by the same weights
        assert list(response.logps) == pytest.approx(expected.tolist(), abs=TOLERANCE)


def test_requests_are_added_to_a_rollout_that_runs(engine: RolloutEngine, policy: torch.nn.Module) -> None:
    written = {}
    for response in engine.generate(requests()[:4], Sampling(max_tokens=8, temperature=0), seed=0):
        if not written:
            engine.add(requests()[4:])
        written[response.request_id] = response.token_ids
    assert written == {r.id: greedy_by_hand(policy, list(r.prompt_ids), 8) for r in requests()}


def test_the_seed_of_a_request_decides_its_text_alone(engine: RolloutEngine, policy: torch.nn.Module) -> None:
    def write(numbers: range, seed: int) -> dict[int, Any]:
        asked = [replace(requests()[i], seed=100 + i) for i in numbers]
        return {r.request_id: r.token_ids for r in engine.generate(asked, Sampling(max_tokens=8), seed=seed)}

    together = write(range(6), seed=0)
    assert len({str(tokens) for tokens in together.values()}) > 3
    assert write(range(4, 6), seed=9) == {i: together[i] for i in (4, 5)}


def test_nobody_adds_to_a_rollout_that_is_over(engine: RolloutEngine, policy: torch.nn.Module) -> None:
    run(engine, Sampling(max_tokens=4))
    with pytest.raises(RuntimeError, match="`add` found nobody reading"):
        engine.add(requests())
    with pytest.raises(RuntimeError, match="`stop` found nobody reading"):
        engine.stop([0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"prompt_ids": [5] * MAX_MODEL_LEN}, None),
        ({"prompt_ids": []}, None),
        ({"prompt_ids": [3, 32]}, r"token 32 in a prompt, .* 0 to 31"),
        ({"prompt_ids": [-1, 3]}, r"token -1 in a prompt, .* 0 to 31"),
        ({"prompt_ids": PROMPTS[0], "id": 0}, "repeats ids"),
        ({"prompt_ids": PROMPTS[0], "max_tokens": 0}, None),
        ({"prompt_ids": PROMPTS[0], "max_tokens": 2, "written": WRITTEN}, None),
    ],
)
def test_a_request_that_cannot_be_answered_leaves_a_usable_engine(
    engine: RolloutEngine, policy: torch.nn.Module, bad: dict[str, Any], message: str | None
) -> None:
    """By an error of this package, or of vLLM or transformers."""
    expected = run(engine, Sampling(max_tokens=16, temperature=0))
    with pytest.raises(Exception, match=message):
        list(engine.generate([Request(id=0, prompt_ids=PROMPTS[0]), Request(**{"id": 1, **bad})], Sampling(), seed=0))
    assert run(engine, Sampling(max_tokens=16, temperature=0)) == expected


def test_a_response_ends_where_the_context_is_full(engine: RolloutEngine, policy: torch.nn.Module) -> None:
    asked = [Request(id=i, prompt_ids=[5] * (MAX_MODEL_LEN - room)) for i, room in enumerate((1, 4))]
    responses = {r.request_id: r for r in engine.generate(asked, Sampling(max_tokens=24), seed=0)}
    assert len(responses[0].token_ids) == 1
    assert len(responses[1].token_ids) <= 4
    assert all(r.finish_reason == "length" or r.token_ids[-1] == 1 for r in responses.values())
