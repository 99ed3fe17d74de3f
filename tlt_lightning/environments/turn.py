"""Hold what the policy says in one turn, and read the tool calls in it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """Holds what the policy has asked for.

    Args:
        name: The tool.
        arguments: Values by name.
        error: Why it could not be read; then there is nothing to call.
    """

    name: str
    arguments: Mapping[str, Any]
    error: str = ""


@dataclass(frozen=True, slots=True)
class Turn:
    """Holds a turn of the policy, as tokens and as what they say.

    Args:
        words: Its text.
        beside: Its text beside the calls.
        calls: What it asks of tools.
        before: Token ids of all that came before it.
        ids: Its token ids.
        logps: Their log-probs.
        is_cut: True if it had to end before the policy ended it.
    """

    words: str
    beside: str = ""
    calls: Sequence[ToolCall] = ()
    before: Sequence[int] = ()
    ids: Sequence[int] = ()
    logps: Sequence[float] = ()
    is_cut: bool = False


def read_calls(
    tokenizer: PreTrainedTokenizerBase,
    words: str,
    token_ids: Sequence[int],
    before: Sequence[int],
    tools: Sequence[dict[str, Any]],
) -> tuple[str, list[ToolCall]]:
    """Return the text beside the calls in a turn, and the calls in order.

    A tokenizer that has a `response_template` reads them. Of others they are as Hermes and Qwen write them:
    `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

    Args:
        tokenizer: The policy's.
        words: The turn's text.
        token_ids: The turn.
        before: All tokens in front of it.
        tools: JSON schemas of the tools.
    """
    if getattr(tokenizer, "response_template", None) is None:
        return _CALL.sub("", words), [_read(text) for text in _CALL.findall(words)]
    try:
        message = tokenizer.parse_response(list(token_ids), prefix=list(before), tools=list(tools)) or {}
        calls = [_checked(call.get("function", call)) for call in message.get("tool_calls") or ()]
        return message.get("content") or "", calls
    except Exception as error:  # whatever a policy writes must not end the run
        return words, [ToolCall("unknown", {}, str(error))]


def _read(text: str) -> ToolCall:
    try:
        return _checked(json.loads(text))
    except (ValueError, RecursionError) as error:  # also a number of 5,000 digits, or 5,000 brackets
        return ToolCall("unknown", {}, f"The call is no JSON: {error}.")


def _checked(call: Any) -> ToolCall:
    name, arguments = (call.get("name"), call.get("arguments", {})) if isinstance(call, Mapping) else (None, None)
    if not isinstance(name, str) or not isinstance(arguments, Mapping):
        return ToolCall("unknown", {}, 'A call must be {"name": <name>, "arguments": {<argument>: <value>}}.')
    return ToolCall(name, arguments)
