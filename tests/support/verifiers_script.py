"""The program of `VerifiersEnvironment` with rollouts written by hand in the place of the library's."""

import asyncio
import json
import os
import sys
import time
from contextlib import nullcontext
from typing import Any

from aiohttp import ClientSession

from tlt_lightning.recipes.assets.verifiers_program import serve

CALL = {"type": "function", "function": {"name": "add", "parameters": {}}}


class Scripted:
    """Asks for a turn three times, or does what its row says at the second."""

    serving = nullcontext

    def __init__(self, rows: list[str]) -> None:
        self.rows = rows

    def load(self, split: str) -> list[tuple[str, str, str]]:
        time.sleep(2.5 if "reads" in self.rows else 0.0)
        return [("8 9 =", row, row) for row in self.rows]

    async def play(self, row: str, url: str) -> tuple[float, Any]:
        messages: list[dict[str, Any]] = [{"role": "user", "content": "8 9 ="}]
        async with ClientSession() as session:
            for turn in (1, 2, 3):
                body = {
                    "model": "policy",
                    "messages": messages,
                    "tools": [CALL] if row == "calls" else None,
                    "stream": row == "streams",
                }
                if turn == 2:
                    body |= OTHERWISE.get(row, {})
                if turn == 2 and row == "forgets":
                    messages[0]["content"] = "A new one."
                async with session.post(f"{url}/chat/completions", json=body) as response:
                    text = await response.text()
                if response.status == 400:
                    assert "maximum context length" in text
                    return 0.1 * turn, None
                (choice,) = json.loads(text.removeprefix("data: ").removesuffix("data: [DONE]\n\n"))["choices"]
                message = choice["delta" if row == "streams" else "message"]
                messages = [*messages, {**message, "refusal": None}]  # as libraries add keys without a value
                if turn == 1 and row in ACTS:
                    await ACTS[row]()
                if turn == 1 and row == "errs":
                    return 0.0, {"error": "ModelError"}
                calls = message.get("tool_calls")
                called = {"tool_call_id": calls[0]["id"]} if calls else {}
                role = "tool" if called else "user"
                messages.append({"role": role, "content": [{"type": "text", "text": f"= {turn} :"}], **called})
        return 1.0, None


async def fail() -> None:
    raise KeyError("made to fail")


async def block() -> None:
    time.sleep(60)


async def die() -> None:
    os._exit(3)


async def hang() -> None:
    await asyncio.sleep(60)


ACTS = {"raises": fail, "hangs": hang, "blocks": block, "dies": die}
OTHERWISE: dict[str, dict[str, Any]] = {
    "repeats": {"messages": [{"role": "user", "content": "8 9 ="}]},
    "samples": {"temperature": 0.5},
    "changes": {"tools": [CALL]},
    "shows": {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]},
}

if __name__ == "__main__":
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    name, args = sys.argv[1:]
    if name == "broken":
        raise ImportError("no such environment")
    print("an environment may print")
    game: Any = Scripted(json.loads(args).get("rows", ["ends"]))
    stalled = {"blocks": 1.0, "reads": 2.0}.get("".join(game.rows), 60.0)
    asyncio.run(serve(game, out, stalled))
