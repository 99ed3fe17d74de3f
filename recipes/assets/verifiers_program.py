"""Run rollouts of `verifiers` for the process that has the policy: a program that needs `verifiers` alone.

Each connection to its socket is a rollout, of lines of JSON: in come a row's place and the policy's turns, out go the
rollout's requests for them, its reward or its error.
"""

from __future__ import annotations

import asyncio
import faulthandler
import json
import os
import sys
from contextlib import nullcontext
from functools import cache, partial
from importlib.util import find_spec
from typing import Any, TextIO

from aiohttp import web
from aiohttp.test_utils import TestServer

MODEL = "policy"
LOADING = asyncio.Lock()
LARGEST = 2**30  # of a request and of a line, in bytes
FULL = {"error": {"message": "This model's maximum context length is reached.", "code": "context_length_exceeded"}}


class Classic:
    """Plays environments of `verifiers` up to 0.3."""

    def __init__(self, name: str, args: dict[str, Any]) -> None:
        from verifiers import load_environment

        self.environment, self.serving = load_environment(name, **args), nullcontext

    @cache  # noqa: B019 - one for the whole process
    def load(self, split: str) -> list[tuple[Any, Any, Any]]:
        """Return prompt, answer and row, of each of a split."""
        rows = self.environment.get_eval_dataset() if split == "eval" else self.environment.get_dataset()
        return [(row["prompt"], row.get("answer"), row) for row in rows]

    async def play(self, row: dict[str, Any], url: str) -> tuple[float, Any]:
        """Run a rollout with the model at `url`; return its reward, and its error if it has one."""
        from openai import AsyncOpenAI
        from verifiers.clients import OpenAIChatCompletionsClient

        async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=None) as client:
            output = await self.environment.run_rollout(row, OpenAIChatCompletionsClient(client), MODEL, {})
        return output["reward"], output["error"]


class Tasks:
    """Plays tasks of `verifiers` since 0.4."""

    def __init__(self, name: str, args: dict[str, Any]) -> None:
        from verifiers.v1.utils.loaders import load_environment, resolve_env_config

        taskset = {**args.get("taskset", {}), "id": name}
        self.environment = load_environment(resolve_env_config({**args, "taskset": taskset}))
        self.serving = self.environment.serving

    @cache  # noqa: B019 - one for the whole process
    def load(self, split: str) -> list[tuple[Any, Any, Any]]:
        """Return prompt, answer and task; there is one split."""
        return [(task.data.prompt_text, getattr(task.data, "answer", None), task) for task in self.environment.taskset]

    async def play(self, task: Any, url: str) -> tuple[float, Any]:
        """Run an episode with the model at `url`; return its reward, and its errors if it has any."""
        from verifiers.v1.clients import ModelContext
        from verifiers.v1.configs.client import EvalClientConfig

        context = ModelContext(model=MODEL, client=EvalClientConfig(base_url=url, api_key_var="NONE"))
        (slot,) = self.environment.slots(task)
        episode = await self.environment.run_slot(slot, context)
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        return sum(trace.reward for trace in episode.traces), None if episode.ok else errors


async def hear(game: Classic | Tasks, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Say what rows there are, or play one until it ends or nobody is there any more."""
    asked = json.loads(await reader.readline())
    turns = asyncio.Queue[dict[str, Any]]()
    playing: Any = asyncio.current_task()

    def tell(**what: Any) -> None:
        writer.write(json.dumps(what).encode() + b"\n")

    async def listen() -> None:
        async for line in reader:
            turns.put_nowait(json.loads(line))
        turns.put_nowait({"message": None})
        playing.cancel()

    async def complete(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        tell(request=body)
        turn = await turns.get()
        if turn["message"] is None:
            turns.put_nowait(turn)  # it stays full
            return web.json_response(FULL, status=400)
        return completion(turn, is_streamed=bool(body.get("stream")))

    application = web.Application(client_max_size=LARGEST)
    application.router.add_post("/v1/chat/completions", complete)
    listening = asyncio.create_task(listen())
    try:
        async with LOADING:  # in a thread: to read a large data set is not to be stalled
            rows = await asyncio.to_thread(game.load, asked["split"])
        if asked["index"] is None:
            return tell(rows=[{"prompt": prompt, "answer": answer} for prompt, answer, _ in rows])
        async with TestServer(application) as server:
            reward, error = await game.play(rows[asked["index"]][2], str(server.make_url("/v1")))
        tell(reward=reward) if error is None else tell(error=str(error))
    except asyncio.CancelledError:
        pass  # nobody hears of it
    except Exception as error:
        tell(error=repr(error))
    finally:
        listening.cancel()
        writer.close()


def completion(turn: dict[str, Any], *, is_streamed: bool) -> web.Response:
    """Return a turn of the policy as an API does, with the tokens besides as vLLM names them."""
    message, ids, before = turn["message"], turn["ids"], turn["before"]
    if calls := [{"index": place, **call} for place, call in enumerate(message.get("tool_calls", ()))]:
        message["tool_calls"] = calls
    finish = "length" if turn["is_cut"] else "tool_calls" if calls else "stop"
    said = zip(ids, turn["logps"], strict=True)
    logprobs = [{"token": f"token_id:{id}", "logprob": logp, "bytes": None, "top_logprobs": []} for id, logp in said]
    choice = {"index": 0, "delta" if is_streamed else "message": message, "finish_reason": finish}
    choice |= {"token_ids": ids, "logprobs": {"content": logprobs}}
    usage = {"prompt_tokens": len(before), "completion_tokens": len(ids), "total_tokens": len(before + ids)}
    answer = {"id": "turn", "object": "chat.completion" + ".chunk" * is_streamed, "created": 0, "model": MODEL}
    text = json.dumps({**answer, "choices": [choice], "usage": usage, "prompt_token_ids": before})
    if is_streamed:
        return web.Response(text=f"data: {text}\n\ndata: [DONE]\n\n", content_type="text/event-stream")
    return web.Response(text=text, content_type="application/json")


async def serve(game: Classic | Tasks, out: TextIO, stalled: float = 60.0) -> None:
    """Take connections as long as the parent lives; die where one rollout keeps all from running for too long."""
    parent = os.getppid()
    server = await asyncio.start_server(partial(hear, game), "127.0.0.1", limit=LARGEST, backlog=1024)
    async with game.serving(), server:
        print(json.dumps({"port": server.sockets[0].getsockname()[1]}), file=out, flush=True)
        while os.getppid() == parent:
            faulthandler.dump_traceback_later(stalled, exit=True)
            await asyncio.sleep(min(1.0, stalled / 4))


if __name__ == "__main__":
    said = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever an environment prints
    sys.path.append(os.getcwd())
    game = (Classic if find_spec("verifiers.envs") else Tasks)(sys.argv[1], json.loads(sys.argv[2]))
    asyncio.run(serve(game, said))
