"""Environments of the library `verifiers`, and rollouts that are written by hand in its place."""

import asyncio
import json
import os
import re
import subprocess
import sys
import time
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from tests.support.chat_tokenizers import byte_tokenizer, template_of
from tests.support.rl_runs import Recorder, make_data, make_module, make_trainer
from tests.support.scripted_engine import ScriptedEngine
from tlt_lightning import PromptSource, Sampling, TurnLimits, VerifiersEnvironment
from tlt_lightning.data.streams.conversations import ConversationStream
from tlt_lightning.environments import verifiers
from tlt_lightning.environments.conversation import Trajectory
from tlt_lightning.environments.environments import Environments
from tlt_lightning.environments.turns import Turns
from tlt_lightning.policy import load_tokenizer
from tlt_lightning.rollout import Prompt, Request, Response
from tlt_lightning.tasks import VerifiersRows

ROOT = Path(__file__).parents[2]
PYTHONS = os.environ.get("VERIFIERS_PYTHONS", "").split()
"""Interpreters with a version of `verifiers` each."""


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifiers, "PROGRAM", ROOT / "tests" / "support" / "verifiers_script.py")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def play(
    environment: VerifiersEnvironment, turns: Turns, said: list[list[int]], **limits: Any
) -> tuple[ScriptedEngine, dict[int, tuple[Response, Trajectory]]]:
    """Hold a conversation on each row of an environment, in whose turns the policy says this."""
    engine = ScriptedEngine(lambda request, number: said[number], ends=turns.ends)
    stream = ConversationStream(engine, Environments(environment), TurnLimits(**{"seconds": 200.0, **limits}))
    source = PromptSource(rows=VerifiersRows(environment.id, environment.args, environment.python))
    rows = source.read()
    prompts = [Prompt("1", (1,), row=row, index=index) for index, row in enumerate(rows)]
    stream.speak(source, turns, 4000)
    requests = [Request(id=index, prompt_ids=(1,)) for index in range(len(rows))]
    stream.ask(requests, Sampling(max_tokens=400), seed=0, prompts=prompts)
    ended = {response.request_id: response for response in stream}
    talks = {number: (response, stream.trajectory(number)) for number, response in ended.items()}
    stream.close()
    return engine, {number: (response, talk) for number, (response, talk) in sorted(talks.items()) if talk is not None}


@pytest.mark.slow
def test_conversations_go_on_from_what_was_sampled_and_break_alone(
    scripted: None, policy_path: str, caplog: pytest.LogCaptureFixture
) -> None:
    rows = ["ends", "raises", "errs", "hangs", "forgets", "repeats", "samples", "changes", "shows", "streams"]
    turns = Turns(load_tokenizer(policy_path), None, end_tokens=[1])
    said = [[20, 21, 1], [22, 1], [23, 1]]
    engine, ended = play(VerifiersEnvironment("game", {"rows": rows}), turns, said, seconds=6.0)  # for one that hangs
    ids = turns.ids
    whole = [20, 21, 1, *ids("= 1 :"), 22, 1, *ids("= 2 :"), 23, 1]
    broken = {
        "raises": "made to fail",
        "errs": "ModelError",
        "hangs": "no answer within",
        "forgets": "A new one",
        "repeats": "none behind them",
        "samples": "'temperature': 0.5.*data.sampling",
        "changes": "does not go on",
        "shows": "more than text",
    }
    second = 3 + len(ids("= 1 :"))
    for row, (response, trajectory) in zip(rows, ended.values(), strict=True):
        assert [*trajectory.prompt.ids] == ids("8 9 =")
        if row in broken:
            assert re.search(broken[row], str(trajectory.talk.error))
            assert (list(response.token_ids), trajectory.talk.reward) == (whole[:3], 0.0)
        else:
            assert (list(response.token_ids), trajectory.talk.reward) == (whole, 1.0)
            assert [*response.turns] == [(0, 3), (second, second + 2), (len(whole) - 2, len(whole))]
    assert engine.read[0][2] == [*ids("8 9 ="), *whole[:-2]]
    assert sum("VerifiersEnvironment` failed" in record.getMessage() for record in caplog.records) == 1


def test_calls_and_their_results_are_tokens_of_the_template(scripted: None) -> None:
    tokenizer = byte_tokenizer(template_of("qwen2_5"), "<|im_end|>")
    call = 'So: <tool_call>{"name": "add", "arguments": {}}</tool_call><|im_end|>'
    said = [tokenizer(text)["input_ids"] for text in (call, call, "10<|im_end|>")]
    turns = Turns(tokenizer, tokenizer.chat_template)
    _, ended = play(VerifiersEnvironment("game", {"rows": ["calls"]}), turns, said)
    ((response, trajectory),) = ended.values()
    assert (trajectory.talk.error, trajectory.talk.reward, trajectory.talk.num_calls) == (None, 1.0, 2)
    assert '"name": "add"' in tokenizer.decode(trajectory.prompt.ids)
    before, after = "\n<|im_start|>user\n<tool_response>\n", "\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(response.token_ids) == (f"{call}{before}= 1 :{after}{call}{before}= 2 :{after}10<|im_end|>")


def test_a_conversation_at_its_limit_is_scored(scripted: None, policy_path: str) -> None:
    turns = Turns(load_tokenizer(policy_path), None, end_tokens=[1])
    _, ended = play(VerifiersEnvironment("game", {"rows": ["ends"]}), turns, [[20, 1], [22, 1]], most=2)
    ((response, trajectory),) = ended.values()
    assert (trajectory.talk.reward, len(response.turns)) == (pytest.approx(0.3), 2)  # of a third request, refused


@pytest.mark.slow
@pytest.mark.parametrize(("row", "code"), [("dies", 3), ("blocks", 1)])
def test_a_process_that_ends_is_said_and_started_again(row: str, code: int, scripted: None, policy_path: str) -> None:
    turns = Turns(load_tokenizer(policy_path), None, end_tokens=[1])
    environment = VerifiersEnvironment("game", {"rows": [row]})
    for _ in range(2):
        _, ended = play(environment, turns, [[20, 1], [22, 1]])
        ((_, trajectory),) = ended.values()
        assert f"ended with code {code}" in str(trajectory.talk.error)
    again = deepcopy(environment)  # as one is lent to a conversation
    assert asyncio.run(again.reset(split="train", index=0)) == [{"role": "user", "content": "8 9 ="}]


@pytest.mark.slow
def test_rows_that_take_long_to_read_end_no_process(scripted: None) -> None:
    assert [row["answer"] for row in VerifiersRows("game", {"rows": ["reads"]})] == ["reads"]


def test_an_environment_that_cannot_be_loaded_says_where_to_look(scripted: None) -> None:
    with pytest.raises(RuntimeError, match=r"ended with code 1, see above: .*verifiers_script.py"):
        VerifiersEnvironment("broken")


@pytest.mark.parametrize("arguments", [{"args": ["--level", 1]}, {"python": 3}])
def test_an_argument_of_another_kind_is_refused_before_anything_starts(scripted: None, arguments: Any) -> None:
    with pytest.raises(TypeError, match=f"^`{next(iter(arguments))}` must be "):
        VerifiersEnvironment("scripted", **arguments)


@pytest.mark.slow
def test_the_process_ends_with_the_run(scripted: None) -> None:
    code = (
        "import os; from pathlib import Path; from tlt_lightning.environments import verifiers as v;"
        f"v.PROGRAM = Path({str(verifiers.PROGRAM)!r});"
        "print(v.VerifiersEnvironment('game', {'rows': []})._process._process.pid, flush=True); os._exit(9)"
    )
    number = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=False, text=True).stdout
    for _ in range(1000):
        if not Path(f"/proc/{int(number)}").exists():
            return
        time.sleep(0.1)
    pytest.fail("it still runs")


# With the library


@pytest.fixture(params=PYTHONS or [pytest.param("", marks=pytest.mark.skip(reason="VERIFIERS_PYTHONS names none"))])
def installed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> VerifiersEnvironment:
    """Environments with a tool, of each installed version; what they record is written to `tmp_path`."""
    python = Path(request.param)
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests" / "support" / "verifiers_games"))
    monkeypatch.setenv(
        "PATH", f"{python.parent}:{os.environ['PATH']}"
    )  # where `uv` is, which tasks start programs with
    monkeypatch.setenv("RECORDED", str(tmp_path / "recorded.jsonl"))
    verifiers._process_of.cache_clear()  # one that runs writes where another test told it to
    ask = "import importlib.util as u, verifiers; print(u.find_spec('verifiers.envs') is not None)"
    is_classic = subprocess.check_output([python, "-c", ask], text=True).strip() == "True"
    if is_classic:
        return VerifiersEnvironment("classic_game", {"tools": True}, str(python))
    agent = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
    return VerifiersEnvironment("task_game", {"agent": agent}, str(python))


def test_the_librarys_tool_answers_a_call(installed: VerifiersEnvironment, tmp_path: Path) -> None:
    name = "add" if installed.id == "classic_game" else "adding_add"
    tokenizer = byte_tokenizer(template_of("qwen2_5"), "<|im_end|>")
    call = f'Let me see. <tool_call>{{"name": "{name}", "arguments": {{"a": 1, "b": 9}}}}</tool_call><|im_end|>'
    said: list[list[int]] = [tokenizer(text)["input_ids"] for text in (call, call, "10 it is<|im_end|>")]
    turns = Turns(tokenizer, tokenizer.chat_template)
    engine, ended = play(installed, turns, said, seconds=200.0)
    response, trajectory = ended[1]
    assert trajectory.talk.error is None
    assert name in tokenizer.decode(trajectory.prompt.ids)
    result = "\n<|im_start|>user\n<tool_response>\n10\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(response.token_ids) == f"{call}{result}{call}{result}10 it is<|im_end|>"
    assert trajectory.talk.reward == pytest.approx(1 / 9 if installed.id == "classic_game" else 1.0)
    assert engine.read[1][2] == [*trajectory.prompt.ids, *response.token_ids[: -len(said[2])]]


def test_what_the_library_records_is_what_is_trained_on(
    installed: VerifiersEnvironment, policy_path: str, prompts_path: str, tmp_path: Path
) -> None:
    args = {} if installed.id == "classic_game" else installed.args
    environment = VerifiersEnvironment(installed.id, args, installed.python)
    source = PromptSource(rows=VerifiersRows(installed.id, args, installed.python))
    recorder, module = Recorder(), make_module(policy_path)
    data = make_data(
        prompts_path,
        train=source,
        val=None,
        environment=environment,
        turns=TurnLimits(tokens=4, seconds=200.0, waits=True),
        sampling=Sampling(max_tokens=24),
        prompts_per_iteration=2,
    )
    trainer = make_trainer(tmp_path, recorder, max_epochs=1)
    trainer.fit(module, data)
    (rollouts,), (batch,) = recorder.rollouts, recorder.batches
    recorded = [json.loads(line) for line in (tmp_path / "recorded.jsonl").read_text().splitlines()]
    trained = []
    for rollout in rollouts:
        ids, logps, spans = rollout.response.token_ids, rollout.response.logps, rollout.response.turns
        trained.append(
            [
                {
                    "prompt_ids": [*rollout.prompt.ids, *ids[:start]],
                    "completion_ids": [*ids[start:stop]],
                    "completion_logprobs": [*logps[start:stop]],
                }
                for start, stop in spans
            ]
        )
    assert len(recorded) == len(rollouts) == 8
    assert batch.response_mask.sum() == sum(len(turn["completion_ids"]) for turns in trained for turn in turns)
    if installed.id == "classic_game":
        assert all(len(turns) == 3 for turns in trained)
        steps = [[{name: step[name] for name in trained[0][0]} for step in each["steps"]] for each in recorded]
    else:
        tokenizer = Turns(load_tokenizer(policy_path), None, end_tokens=[1])
        trained = [[tokenizer.words(turn["completion_ids"]) for turn in turns] for turns in trained]
        steps = [each["said"] for each in recorded]
    assert sorted(map(json.dumps, steps)) == sorted(map(json.dumps, trained))
    assert trainer.global_step == 2
    assert batch.advantages is not None
    assert batch.advantages.any()
