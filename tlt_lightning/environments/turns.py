"""Write conversations as tokens: their prompts, and what stands between two turns of the policy."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

Message = dict[str, Any]
"""A turn of a conversation: `role` and `content`, and whatever else the chat template reads."""

_MARK = "[observed]"
_THOUGHT = "[thought]"
_ANSWER = f"<think>\n{_THOUGHT}\n</think>\n\nb"  # what some templates take out of earlier turns, others never show
_REWRITES = (
    "The chat template writes a turn of the policy otherwise once another follows: of {before!r} it makes {after!r}. A "
    "conversation could not go on from the tokens that were sampled. Give a template that keeps them in "
    "`data.train.chat_template`; `trl.chat_template_utils.get_training_chat_template` has one for many models."
)
_OPEN_END = (
    "The chat template ends an answer with %r (token %d), which ends no response: what is written behind it is scored "
    "and learned from, up to `max_tokens`. Add it to `eos_token_id` in the policy's generation_config.json, which "
    "`export` keeps, or to `stop_token_ids` of `data.sampling`, and of `data.val_sampling` where that is given."
)
_HOW_TO_CALL = """You may call functions to find out more. These are their signatures:
<tools>
{schemas}
</tools>
For each call write a JSON object with the name of the function and its arguments:
<tool_call>
{{"name": <name>, "arguments": <arguments>}}
</tool_call>"""


class Turns:
    """Writes conversations by a chat template, or as plain text.

    A policy reads in its next turn exactly the tokens that it has sampled, whatever text they decode to. Behind them
    come the tokens of the environment: those that the template puts between the end of a turn and the beginning of the
    next, taken from a made-up conversation (TRL does the same).

    Args:
        tokenizer: The policy's.
        template: The chat template; None writes plain text.
        variables: What the template reads besides the messages.
        end_tokens: Token ids at which the engine ends a turn.
        tools: JSON schemas of the tools that the prompts describe.
        stop_tokens: Further ones. The one with which the template ends an answer is no text, as `end_tokens` are none.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template: str | None,
        variables: Mapping[str, Any] | None = None,
        end_tokens: Collection[int] = (),
        tools: Sequence[dict[str, Any]] = (),
        stop_tokens: Collection[int] = (),
    ) -> None:
        self.tokenizer, self.template = tokenizer, template
        self.variables = {**(variables or {}), "chat_template": template}
        if tools:
            self.variables["tools"] = [*tools]
        self.tools = tools
        self.ends = {*end_tokens, tokenizer.eos_token_id}
        if stop_tokens and (token := self._open_end()) in stop_tokens:
            self.ends.add(token)

    def with_tools(self, tools: Sequence[dict[str, Any]]) -> Turns:
        """Return what writes conversations with these tools in the place of none."""
        return Turns(self.tokenizer, self.template, self.variables, self.ends, tools)

    def prompt(self, messages: Sequence[Message]) -> str:
        """Return a conversation as the policy reads it before a turn; raise ValueError if it cannot be plain text."""
        if self.template is not None:
            return self._text(self._with_tools(messages))
        if len(messages) > 1 or messages[0]["role"] != "user":
            raise ValueError("holds a conversation, which needs a tokenizer with a chat template and `chat: true`")
        return str(messages[0]["content"])

    def words(self, turn: Sequence[int]) -> str:
        """Return the text of a turn without the tokens that end or pad it; other special tokens are text."""
        unseen = {*self.ends, self.tokenizer.pad_token_id, self.tokenizer.bos_token_id}
        return str(self.tokenizer.decode([token for token in turn if token not in unseen]))

    def ids(self, text: str) -> list[int]:
        """Return the tokens of a prompt; of plain text with what the tokenizer puts before it, but no end."""
        tokens: list[int] = self.tokenizer(text, add_special_tokens=self.template is None)["input_ids"]
        if self.template is None and tokens[-1:] == [self.tokenizer.eos_token_id]:
            plain = self._plain_ids(text)
            if tokens[-len(plain) :] != plain:  # the tokenizer appends it: a response would begin behind its own end
                tokens.pop()
        return tokens

    def between(self, messages: Sequence[Message], last: int | None) -> list[int]:
        """Return the tokens behind a turn of the policy that bring it messages and let it begin the next one.

        Args:
            messages: What the environment says, of the role "user" or "tool".
            last: The turn's last token. Unless it is the end of a turn, as where a budget cut it off, the end comes
                first.

        Raises:
            ValueError: The template writes the turn before differently once these messages follow.
        """
        if self.template is None:
            closing = [] if last in self.ends else [self.tokenizer.eos_token_id]
            return closing + self._plain_ids("".join(message["content"] for message in messages))
        if messages[0]["role"] == "tool" and not self._knows_tools:
            results = "\n".join(f"<tool_response>\n{each['content']}\n</tool_response>" for each in messages)
            messages = [{"role": "user", "content": results}]
        turn: Message = {"role": "assistant", "content": _ANSWER}
        if messages[0]["role"] == "tool":  # some templates read there whose result it is
            turn["tool_calls"] = [{"type": "function", "function": {"name": messages[0]["name"], "arguments": {}}}]
        begun = [{"role": "user", "content": "a"}, turn]
        texts = self._text(begun, begins_turn=False), self._text([*begun, *messages])
        before, after = map(self._plain_ids, texts)
        close = self._close(before)
        if after[: close + 1] != before[: close + 1]:
            raise ValueError(_REWRITES.format(before=texts[0], after=texts[1]))
        return after[close + (before[close : close + 1] == [last]) :]

    def check(self) -> None:
        """Raise ValueError if conversations could not go on.

        The template ends a turn by a token at which the engine does not, or drops or rewrites turns of the policy once
        an environment has answered.
        """
        if (token := self._open_end()) is not None:
            raise ValueError(_OPEN_END % (self.tokenizer.decode([token]), token))
        names = [tool["function"]["name"] for tool in self.tools]
        said: list[Message] = [{"role": "tool", "name": name, "content": _MARK} for name in names]
        for message in said or [{"role": "user", "content": _MARK}]:
            self.between([message], None)
        if self.template is not None:
            role = "tool" if said and self._knows_tools else "user"
            begun = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _ANSWER}]
            text = self._text([*begun, {"role": role, "name": "f", "content": _MARK}])
            if _THOUGHT not in text:
                raise ValueError(_REWRITES.format(before=_ANSWER, after=text))

    def _text(self, messages: Sequence[Message], *, begins_turn: bool = True) -> str:
        return str(
            self.tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=begins_turn, **self.variables
            )
        )

    def _plain_ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def _close(self, ids: list[int]) -> int:
        """Return the place of the token that ends the last turn, or the place behind all where the template has none.

        Behind it there may be white space, and the end of the text.
        """
        close = place = len(ids)
        while place and (ids[place - 1] in self.ends or not str(self.tokenizer.decode(ids[place - 1 : place])).strip()):
            place -= 1
            close = place if ids[place] in self.ends else close
        return close

    def warn_of_open_end(self, stop_strings: Collection[str]) -> None:
        """Warn if responses go on behind the special token with which the template ends an answer."""
        token = self._open_end()
        if token is not None and (text := self.tokenizer.decode([token])) not in stop_strings:
            log.warning(_OPEN_END, text, token)

    def _open_end(self) -> int | None:
        """Return the special token with which the template ends an answer, unless the engine ends a turn there."""
        shown = self._shown([{"role": "user", "content": "a"}, {"role": "assistant", "content": _MARK}])
        token = next(iter(self._plain_ids(shown.partition(_MARK)[2].lstrip())), None)
        return token if token in self.tokenizer.added_tokens_decoder and token not in self.ends else None

    @cached_property
    def _knows_tools(self) -> bool:
        """True if the template shows what a tool returns."""
        call = [{"type": "function", "function": {"name": "f", "arguments": {}}}]
        turn = {"role": "assistant", "content": "", "tool_calls": call}
        result = {"role": "tool", "name": "f", "content": _MARK}
        return _MARK in self._shown([{"role": "user", "content": "a"}, turn, result])

    def _shown(self, messages: Sequence[Message]) -> str:
        """Return a conversation as text; empty where there is no template, or it refuses what it does not know."""
        from jinja2 import TemplateError

        try:
            return "" if self.template is None else self._text(messages, begins_turn=False)
        except (TemplateError, TypeError):
            return ""

    def _with_tools(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Say in the first message which tools there are, where the template says nothing of them."""
        names = [tool["function"]["name"] for tool in self.tools]
        if all(name in self._described for name in names):
            return messages
        text = _HOW_TO_CALL.format(schemas="\n".join(map(json.dumps, self.tools)))
        first, *others = messages
        parts = (first["content"], text) if first["role"] == "system" else (text, first["content"])
        return [{**first, "content": "\n\n".join(parts)}, *others]

    @cached_property
    def _described(self) -> str:
        return self._text([{"role": "user", "content": "a"}])
