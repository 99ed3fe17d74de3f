"""Let environments of the library `verifiers` play in a process of their own, by the tokens that were sampled."""

import asyncio
import json
import socket
import subprocess
import sys
from copy import copy
from functools import cache
from pathlib import Path
from typing import Any

from tlt_lightning.arguments import checked
from tlt_lightning.environments.turn import Turn
from tlt_lightning.environments.turns import Message

PROGRAM = Path(__file__).parents[1] / "recipes/assets/verifiers_program.py"  # of the Python that has the library

_DECIDED_HERE = ("model", "messages", "tools", "stream", "stream_options")  # what a request says besides is refused
_LARGEST = 2**30  # bytes of a line


class VerifiersEnvironment:
    """Plays an installed environment of `verifiers`, which asks for the policy's turns as it would ask an API.

    It plays in a process of its own, whose Python may be another. What it asks first is the prompt, with the tools that
    it names. A later request must hold what was said so far, word by word, and messages behind it: those are what the
    policy reads next, behind the very tokens that it has sampled. A request that says anything else, as after a summary
    of the conversation or for a second sampling, breaks the conversation.

    Its rows are `tlt_lightning.tasks.VerifiersRows`.

    Args:
        id: The environment's name, as `verifiers` loads it.
        args: Its arguments; since version 0.4 of `verifiers` the settings of its `env`.
        python: Interpreter that has `verifiers` and the environment; None is this one.

    Raises:
        RuntimeError: It cannot be loaded.
    """

    @checked()
    def __init__(self, id: str, args: dict[str, Any] | None = None, python: str | None = None) -> None:
        self.id, self.args, self.python = id, args, python
        self.tools: list[dict[str, Any]] = []
        """JSON schemas of the tools in the conversation that has begun."""
        self._process = _process_of(id, json.dumps(args or {}), python or sys.executable)
        self._process.load()

    def __deepcopy__(self, memo: Any) -> "VerifiersEnvironment":
        self._process.load()  # again, after it has died: not in the time of a conversation
        return copy(self)

    def rows(self, split: str) -> list[dict[str, Any]]:
        """Return the rows of a split, as `reset` takes them, with a prompt and an answer."""
        with socket.create_connection(self._process.address) as connection:
            connection.sendall(_line(split=split, index=None))
            rows = self._process.read(connection.makefile().readline())["rows"]
        return [{**row, "split": split, "index": index} for index, row in enumerate(rows)]

    async def reset(self, *, split: str, index: int, **row: Any) -> list[Message]:
        """Begin with a row of `VerifiersRows`; return the whole prompt."""
        self._said: list[dict[str, Any]] = []
        self._names: dict[str, str] = {}  # of tools, by call
        self._reward: float | None = None
        self._reader, self._writer = await asyncio.open_connection(*self._process.address, limit=_LARGEST)
        return await self._told(split=split, index=index)

    async def step(self, turn: Turn) -> list[Message]:
        """Say a turn of the policy; return what it reads next, nothing at the end."""
        message: dict[str, Any] = {"role": "assistant", "content": turn.words}
        if turn.calls and not any(call.error for call in turn.calls):  # else it is text, as for engines behind an API
            named = {f"call_{number}": call for number, call in enumerate(turn.calls, start=len(self._names))}
            self._names |= {id: call.name for id, call in named.items()}
            called = [_call(id, call.name, json.dumps(call.arguments)) for id, call in named.items()]
            message |= {"content": turn.beside, "tool_calls": called}
        self._said.append(_core(message))
        tokens: dict[str, Any] = {"before": [*turn.before], "ids": [*turn.ids], "logps": [*turn.logps]}
        return await self._told(message=message, is_cut=turn.is_cut, **tokens)

    async def get_reward(self) -> float:
        """Return the reward; a conversation that the environment would go on with ends here, its context full."""
        while self._reward is None:
            await self._told(ends=True, message=None)
        return self._reward

    async def _told(self, *, ends: bool = False, **what: Any) -> list[Message]:
        """Say something; return what the policy reads next, nothing at the end."""
        try:
            self._writer.write(_line(**what))
            heard = self._process.read(await self._reader.readline())
            if "reward" in heard:
                self._reward = float(heard["reward"])
                self._writer.close()
            return [] if ends or "reward" in heard else self._new(heard["request"])
        except BaseException:
            self._writer.close()  # by which the rollout is given up
            raise

    def _new(self, request: dict[str, Any]) -> list[Message]:
        """Return the messages of a request that were not said before; raise ValueError if they are not all there."""
        if other := {name: said for name, said in request.items() if name not in _DECIDED_HERE and said is not None}:
            raise ValueError(f"The environment asks for {other!r:.200}, and how to sample is said in `data.sampling`.")
        messages, tools, known = [*map(_core, request["messages"])], request.get("tools") or [], len(self._said)
        others_speak = "assistant" not in {message["role"] for message in messages[known:]} and len(messages) > known
        if known and not (messages[:known] == self._said and tools == self.tools and others_speak):
            raise ValueError(
                "The environment does not go on with what was said: its request has other messages or tools than the "
                f"one before and the policy's turn, or none behind them. It begins with {messages[:known]!r:.500} in "
                f"the place of {self._said!r:.500}. Such a conversation cannot be learned from as one."
            )
        self._said, self.tools = messages, tools
        return [self._named(message) for message in messages[known:]] if known else messages

    def _named(self, message: Message) -> Message:
        """Return a tool's result with the tool's name, which chat templates read."""
        id = message.get("tool_call_id")
        return message if id is None else {"role": "tool", "name": self._names[id], "content": message["content"]}


class _Process:
    """Runs an environment of `verifiers` for all conversations with it.

    Args:
        command: Starts it.
    """

    def __init__(self, *command: str) -> None:
        self.command = command
        self._process: subprocess.Popen[str] | None = None

    def load(self) -> None:
        """Start it unless it runs, and wait until it takes connections; raise RuntimeError if it ends before."""
        if self._process is None or self._process.poll() is not None:
            # In a session of its own: what interrupts the run, to end it well, is not for it.
            pipe, none = subprocess.PIPE, subprocess.DEVNULL
            self._process = subprocess.Popen(self.command, stdin=none, stdout=pipe, text=True, start_new_session=True)
            assert self._process.stdout is not None
            self.address = "127.0.0.1", self.read(self._process.stdout.readline())["port"]

    def read(self, line: str | bytes) -> dict[str, Any]:
        """Return what it said; raise RuntimeError if that is an error, or nothing, as where it has ended."""
        if not line and self._process is not None:
            code = self._process.wait(timeout=5.0)
            line = _line(error=f"The process of `verifiers` ended with code {code}, see above: {self.command}.")
        heard: dict[str, Any] = json.loads(line)
        if "error" in heard:
            raise RuntimeError(heard["error"])
        return heard


@cache
def _process_of(id: str, args: str, python: str) -> _Process:
    return _Process(python, "-P", str(PROGRAM), id, args)


def _line(**what: Any) -> bytes:
    return json.dumps(what).encode() + b"\n"


def _core(message: dict[str, Any]) -> dict[str, Any]:
    """Return what of a message is said: libraries add and leave out keys without a value."""
    content = message.get("content") or ""
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if any(part.get("type") != "text" for part in parts):
        raise ValueError(f"A message holds more than text: {content!r:.200}.")
    core = {"role": message["role"], "content": "".join(part["text"] for part in parts)}
    if calls := message.get("tool_calls"):
        core["tool_calls"] = [_call(call["id"], **call["function"]) for call in calls]
    return core | {name: message[name] for name in ("tool_call_id",) if message.get(name)}


def _call(id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
