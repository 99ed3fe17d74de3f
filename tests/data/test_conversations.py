"""Conversations beside an engine: limits, failures, what is stopped and goes on."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, ClassVar

import pytest

from tests.support.chat_tokenizers import byte_tokenizer, template_of
from tests.support.scripted_engine import ScriptedEngine
from tlt_lightning.data.prompts import PromptSource, turns_of
from tlt_lightning.data.streams.conversations import ConversationStream, check_conversations
from tlt_lightning.engine import TransformersEngine
from tlt_lightning.environments.conversation import Conversation, Trajectory
from tlt_lightning.environments.environments import Environments
from tlt_lightning.environments.limits import TurnLimits
from tlt_lightning.environments.turn import ToolCall, Turn
from tlt_lightning.environments.turns import Message, Turns
from tlt_lightning.environments.workers import EnvironmentWorkers
from tlt_lightning.policy import load_tokenizer
from tlt_lightning.rollout import Prompt, Request, Response, Sampling


class Echo:
    """Says what it heard, three times; each method may be made to misbehave."""

    bad: ClassVar[dict[str, Callable[[], Any]]] = {}

    def reset(self, index: int, **row: Any) -> Any:
        self.index, self.heard = index, list[str]()
        return self._or("reset", None)

    def step(self, text: str) -> Any:
        self.heard.append(text)
        return self._or("step", f"= {text}" if len(self.heard) < 3 else None)

    def get_reward(self) -> Any:
        return self._or("get_reward", len(self.heard))

    def _or(self, method: str, usual: Any) -> Any:
        return self.bad[method]() if self.index == 1 and method in self.bad else usual


def hang() -> None:
    time.sleep(60)


async def hang_alone() -> None:
    await asyncio.sleep(60)


def fail() -> None:
    raise KeyError("made to fail")


def converse(
    policy_path: str, environment: Any, limits: TurnLimits, *, number: int = 3, max_tokens: int = 40, turn: int = 2
) -> tuple[ConversationStream, ScriptedEngine, list[Request], list[Prompt]]:
    """Begin conversations in which the policy says a number and ends its turn."""
    tokenizer = load_tokenizer(policy_path)
    engine = ScriptedEngine(lambda request, said: [20 + said] * (turn - 1) + [1])
    stream = ConversationStream(engine, Environments(environment), limits)
    rows: list[dict[str, Any]] = [{"prompt": "8 9 =", "index": index} for index in range(number)]
    stream.speak(PromptSource(rows=rows, answer_column=None), Turns(tokenizer, None, end_tokens=[1]), 16)
    prompts = [Prompt("8 9 =", (20, 21, 3), row=row) for row in rows]
    requests = [Request(id=10 + index, prompt_ids=prompts[index].ids) for index in range(number)]
    stream.ask(requests, Sampling(max_tokens=max_tokens), seed=0, prompts=prompts)
    return stream, engine, requests, prompts


def of(stream: ConversationStream, number: int) -> Trajectory:
    trajectory = stream.trajectory(number)
    assert trajectory is not None
    return trajectory


@pytest.mark.parametrize("waits", [True, False])
def test_turns_go_to_and_fro_and_what_was_said_is_observed(waits: bool, policy_path: str) -> None:
    stream, engine, _, _ = converse(policy_path, Echo, TurnLimits(waits=waits))
    responses = {response.request_id: response for response in stream}
    assert sorted(responses) == [10, 11, 12]
    words = [20, 1, 3, 20, 21, 1, 3, 21, 22, 1]  # "8 <eos>= 8 9 <eos>= 9 10 <eos>"
    for number, response in responses.items():
        assert (response.token_ids, response.observed) == (words, ((2, 2), (6, 2)))
        assert response.finish_reason == "stop"
        assert engine.read[number][-1] == [20, 21, 3, *words[:8]]
        assert (of(stream, number).talk.reward, of(stream, number).talk.num_turns) == (3, 3)
    assert engine.num_generates == 1
    used = [of(stream, number).talk.environment for number in responses]
    assert stream.environments.take() in used  # one that has ended is lent again
    stream.close()


@pytest.mark.parametrize(
    ("method", "outcome", "message", "num_tokens"),
    [
        ("reset", fail, "made to fail", 1),
        ("reset", lambda: 5, "neither text nor None", 1),
        ("reset", lambda: " 1" * 100, "have no room", 1),
        ("reset", lambda: "x" * 10**6, "have no room", 1),
        ("step", fail, "made to fail", 2),
        ("step", hang, "no answer within", 2),
        ("step", hang_alone, "no answer within", 2),
        ("step", lambda: ["1"], "neither text nor None", 2),
        ("get_reward", lambda: "much", "no number", 10),
        ("get_reward", lambda: float("nan"), "not finite", 10),
        ("get_reward", lambda: [1, 0], "2 rewards for 3 turns", 10),
    ],
)
def test_an_environment_that_fails_costs_its_conversation_alone(
    method: str,
    outcome: Callable[[], Any],
    message: str,
    num_tokens: int,
    policy_path: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(Echo, "bad", {method: outcome})
    seconds = 1.0 if outcome in (hang, hang_alone) else 200.0
    stream, _, _, _ = converse(policy_path, Echo, TurnLimits(seconds=seconds))
    responses = {response.request_id: response for response in stream}
    assert {number: of(stream, number).talk.reward for number in responses} == {10: 3, 11: 0, 12: 3}
    assert len(responses[11].token_ids) == num_tokens
    assert message in str(of(stream, 11).talk.error)
    (warning,) = [record.getMessage() for record in caplog.records if "Environment `Echo` failed" in record.message]
    assert "'index': 1" in warning
    stream.close()


def test_columns_and_arguments_may_have_any_name() -> None:
    class Web:
        def reset(self, method: str, **row: Any) -> str:
            return method

        def fetch(self, method: str) -> str:
            """Fetch it.

            Args:
                method: GET or POST.
            """
            return method

    talk = Conversation(Environments(Web), {"method": "chat"}, EnvironmentWorkers(1.0).call)
    assert asyncio.run(talk.begin()) == "chat"
    (said,) = asyncio.run(talk.answer(Turn("", calls=[ToolCall("fetch", {"method": "GET"})])))
    assert said["content"] == "GET"


def test_a_coroutine_that_blocks_the_others_is_left_behind(policy_path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    is_over = threading.Event()

    async def block() -> None:
        is_over.wait(200)

    monkeypatch.setattr("tlt_lightning.environments.workers.GRACE", 0.3)
    monkeypatch.setattr(Echo, "bad", {"step": block})
    stream, _, _, _ = converse(policy_path, Echo, TurnLimits(seconds=0.2))
    assert len(list(stream)) == 3
    assert "blocked its event loop" in str(of(stream, 11).talk.error)
    stream.close()
    is_over.set()


@pytest.mark.parametrize(
    ("limits", "max_tokens", "num_tokens", "reason"),
    [
        (TurnLimits(most=2), 40, 6, "stop"),  # as `length` it would count as one of 40 tokens
        (TurnLimits(most=3), 40, 10, "stop"),
        (TurnLimits(), 10, 10, "stop"),
        (TurnLimits(), 9, 9, "stop"),  # within the third turn, with which the environment is content
        (TurnLimits(), 8, 6, "length"),  # no token is left for it
        (TurnLimits(tokens=1), 40, 10, "stop"),  # of each turn the end, which is an observation
    ],
)
def test_budgets_end_turns_and_conversations(
    limits: TurnLimits, max_tokens: int, num_tokens: int, reason: str, policy_path: str
) -> None:
    stream, _, _, _ = converse(policy_path, Echo, limits, max_tokens=max_tokens)
    for response in stream:
        assert response.finish_reason in ("length", reason) if limits.tokens else response.finish_reason == reason
        if limits.tokens is None:
            assert len(response.token_ids) == num_tokens
        else:
            assert response.token_ids == [20, 1, 3, 20, 21, 1, 3, 21, 22]
            assert response.observed == ((1, 3), (5, 3))
    stream.close()


def test_megabytes_end_a_conversation_unread(policy_path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Echo, "bad", {"step": lambda: "x" * 10**6})  # a token here; elsewhere to read it takes seconds
    stream, _, _, _ = converse(policy_path, Echo, TurnLimits())
    responses = {response.request_id: response for response in stream}
    assert (responses[11].token_ids, responses[11].finish_reason) == ([20, 1], "length")
    assert (of(stream, 11).talk.reward, of(stream, 12).talk.reward) == (1, 3)
    stream.close()


class Tools:
    def reset(self, **row: Any) -> None: ...

    def look(self) -> str:
        """Look."""
        return "nothing"


@pytest.mark.parametrize(("max_tokens", "reason"), [(40, "stop"), (1, "length")])
def test_a_turn_without_a_call_that_its_own_limit_cuts_is_not_counted_as_the_longest_response(
    max_tokens: int, reason: str, policy_path: str
) -> None:
    stream, _, _, _ = converse(policy_path, Tools, TurnLimits(tokens=1), max_tokens=max_tokens)
    for response in stream:
        assert (response.token_ids, response.finish_reason) == ([20], reason)
        assert of(stream, response.request_id).talk.num_cut_turns == 1
    stream.close()


def test_a_conversation_that_was_stopped_goes_on_with_its_environment(policy_path: str) -> None:
    stream, _, requests, prompts = converse(policy_path, Echo, TurnLimits())
    stream.stop([10])  # at its environment
    stopped = next(stream)
    assert (stopped.request_id, stopped.is_unfinished) == (10, True)
    assert {next(stream).request_id, next(stream).request_id} == {11, 12}
    assert list(stream) == []
    again = Request(id=10, prompt_ids=requests[0].prompt_ids, written=stopped)
    stream.ask([again], Sampling(max_tokens=40), seed=0, prompts=prompts[:1])
    (response,) = stream
    assert response.token_ids == [20, 1, 3, 20, 21, 1, 3, 21, 22, 1]
    assert of(stream, 10).talk.reward == 3
    stream.close()


def test_a_conversation_is_open_until_its_response_has_been_taken(policy_path: str) -> None:
    stream, _, _, _ = converse(policy_path, Echo, TurnLimits())
    stream.stop([10, 11, 12])  # an asynchronous schedule may leave some of what has ended to its next iteration
    assert next(stream).request_id == 10
    assert stream.open_ids == {11, 12}
    stream.stop([11, 12])  # which have ended
    assert [response.request_id for response in stream] == [11, 12]
    assert stream.open_ids == set()
    stream.close()


def test_a_conversation_stopped_in_the_step_that_ends_its_turn_writes_no_further_one(policy_path: str) -> None:
    stream, engine, requests, prompts = converse(policy_path, Echo, TurnLimits(), number=1)
    stream.tell = lambda progress: stream.stop([10])  # too late for the engine
    (stopped,) = stream
    assert (stopped.finish_reason, stopped.token_ids) == ("unfinished", [20, 1])
    stream.tell = lambda progress: None
    again = Request(id=10, prompt_ids=requests[0].prompt_ids, written=stopped)
    stream.ask([again], Sampling(max_tokens=40), seed=0, prompts=prompts)
    (response,) = stream
    assert response.token_ids == [20, 1, 3, 20, 21, 1, 3, 21, 22, 1]
    assert engine.num_generates == 2
    stream.close()


def test_what_is_written_of_a_turn_when_it_is_stopped_is_gone_on_with(policy_path: str) -> None:
    stream, engine, requests, prompts = converse(policy_path, Echo, TurnLimits(), number=1)
    generate = engine.generate

    def stopped_within(*args: Any, **settings: Any) -> Iterator[Response]:
        for each in generate(*args, **settings):
            yield replace(each, token_ids=each.token_ids[:-1], logps=each.logps[:-1], finish_reason="unfinished")

    engine.generate = stopped_within  # type: ignore[method-assign]
    (stopped,) = stream
    assert stopped.token_ids == [20]
    engine.generate = generate  # type: ignore[method-assign]
    again = replace(requests[0], written=stopped)
    stream.ask([again], Sampling(max_tokens=40), seed=0, prompts=prompts)
    (response,) = stream
    assert engine.read[10][1] == [*prompts[0].ids, 20]
    assert response.token_ids[:3] == [20, 21, 1]
    stream.close()


def test_a_turn_that_waits_in_the_engine_is_not_begun_once_its_conversation_is_stopped(policy_path: str) -> None:
    stream, engine, _, _ = converse(policy_path, Echo, TurnLimits(waits=True))
    stream.tell = lambda progress: stream.stop([12])
    responses = {response.request_id: response for response in stream}
    assert [(number, responses[number].is_unfinished) for number in sorted(responses)] == [
        (10, False),
        (11, False),
        (12, True),
    ]
    assert responses[12].token_ids == []
    assert 12 not in engine.read
    stream.close()


@pytest.mark.parametrize("stops", [False, True])
def test_engines_that_take_requests_from_readers_alone_are_asked_for_more_once_they_are_read(
    stops: bool, policy_path: str
) -> None:
    stream, engine, requests, prompts = converse(policy_path, Echo, TurnLimits())
    engine.takes_from_readers = True
    stream.stop([10, 11])
    aside = [next(stream), next(stream)]
    stream.stop([12])
    aside += stream
    again = [replace(requests[each.request_id - 10], written=each) for each in aside]
    time.sleep(0.3)  # until their environments have begun
    assert list(stream) == []
    stream.ask(again[:1], Sampling(max_tokens=40), seed=0, prompts=prompts[:1])
    stream.ask(again[1:], Sampling(max_tokens=40), seed=0, prompts=prompts[1:])
    if stops:
        stream.stop([11])
    responses = {response.request_id: response for response in stream}
    assert [number for number, response in responses.items() if response.is_unfinished] == [11] * stops
    assert [len(responses[number].token_ids) for number in (10, 12)] == [10, 10]
    stream.close()


def test_requests_of_no_conversation_are_answered_as_they_are(policy_path: str) -> None:
    stream, _, _, _ = converse(policy_path, Echo, TurnLimits(), number=1)
    stream.ask([Request(id=-5, prompt_ids=[2])], Sampling(max_tokens=40), seed=0)
    assert sorted(response.request_id for response in stream) == [-5, 10]
    stream.close()


class Together:
    """Answers once all are asked."""

    asked: ClassVar[list[asyncio.Future[None]]] = []

    def reset(self, **row: Any) -> None: ...

    async def step(self, text: str) -> str | None:
        self.asked.append(asyncio.get_running_loop().create_future())
        if len(self.asked) == 200:
            for each in self.asked:
                each.set_result(None)
        return await self.asked[-1]


def test_hundreds_of_environments_answer_at_once(policy_path: str) -> None:
    stream, _, _, _ = converse(policy_path, Together, TurnLimits(seconds=200), number=200)
    assert len(list(stream)) == 200
    assert of(stream, 10).talk.error is None  # no answer within the limit, were they asked one after the other
    assert of(stream, 10).talk.reward is None
    stream.close()


class Listening:
    """Remembers turns, and asks for another."""

    heard: ClassVar[list[Turn]] = []

    def reset(self, **row: Any) -> list[Message]:
        self.tools: list[Any] = []
        return [{"role": "user", "content": "Which?"}]

    def step(self, turn: Turn) -> list[Message]:
        self.heard.append(turn)
        return [{"role": "user", "content": "More."}]


def test_turns_that_stop_tokens_end_are_read_as_the_template_writes_them() -> None:
    tokenizer = byte_tokenizer(template_of("llama3"), "<|end_of_text|>")
    end, digit = tokenizer.convert_tokens_to_ids(["<|eot_id|>", "7"])
    source, sampling = PromptSource(rows=[{"prompt": ""}]), Sampling(max_tokens=999, stop_token_ids=(end, digit))
    environments, said = Environments(Listening), [[65, end], [66, digit], [67, 68], [69, end]]
    turns = turns_of(source, tokenizer, (), environments, sampling.stop_token_ids)
    engine = ScriptedEngine(lambda request, number: said[number], sampling.stop_token_ids)
    stream = ConversationStream(engine, environments, TurnLimits(most=4, tokens=2))
    stream.speak(source, turns, 99)
    stream.ask([Request(0, (1,))], sampling, seed=0, prompts=[Prompt("", (1,), row={})])
    (response,) = stream
    assert [response.token_ids[start:stop] for start, stop in response.turns] == said
    words = [tokenizer.decode(each) for each in ([65], [66, digit], [67, 68], [69])]
    whole: list[Message] = []
    for answer in words:
        whole += [{"role": "user", "content": "More." if whole else "Which?"}, {"role": "assistant", "content": answer}]
    text = tokenizer.decode([*stream.trajectory(0).prompt.ids, *response.token_ids])
    assert text == turns.prompt(whole).removesuffix("<|start_header_id|>assistant<|end_header_id|>\n\n")
    assert [(turn.words, turn.is_cut) for turn in Listening.heard] == [
        *zip(words, [False, False, True, False], strict=True)
    ]
    stream.close()


def test_what_an_engine_cannot_go_on_with_is_refused() -> None:
    sampling = Sampling(stop_strings=("done",))
    check_conversations(None, TransformersEngine(), sampling)
    with pytest.raises(ValueError, match=r"`stop_token_ids` in the place of `stop_strings` \('done',\)"):
        check_conversations(Environments(Echo), TransformersEngine(), sampling)


def test_a_response_tells_turns_apart() -> None:
    assert Response(0, [5], [0.0], "stop", (0,)).turns == ((0, 1),)
