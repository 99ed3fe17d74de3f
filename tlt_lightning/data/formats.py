"""Turn a row of any known format into texts of the target: tokens, and which of them an assistant wrote."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from itertools import accumulate, chain, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from tlt_lightning.policy import end_token_ids, load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

Turn = dict[str, Any]
Span = tuple[int, int]

FORMATS = (
    "`prompt_ids` and `response_ids` (as `predict` writes them), `messages` (each with `role` and `content`), "
    "`conversations` (each with `from` and `value`), or `prompt` and `completion`"
)
A_DAY = datetime(2024, 7, 26)
"""The date that chat templates write, Llama 3's where there is no clock: texts are the same tokens on every day."""
_MARK = "[answer]"
_ROLES = {"human": "user", "gpt": "assistant"}  # of `conversations`; others are as they are


class Text(NamedTuple):
    """Holds the tokens of a prompt and all that follows it, answers and perhaps later turns of others.

    `others` are the spans behind the prompt, `start` to `stop`, that no assistant wrote.
    """

    ids: list[int]
    prompt_length: int
    others: tuple[Span, ...] = ()

    @property
    def prompt(self) -> list[int]:
        """Tokens before the first answer."""
        return self.ids[: self.prompt_length]

    @property
    def answers(self) -> list[int]:
        """Tokens that an assistant wrote."""
        edges = [self.prompt_length, *(edge for span in self.others for edge in span), len(self.ids)]
        return [token for at in range(0, len(edges), 2) for token in self.ids[edges[at] : edges[at + 1]]]


class LeftOut(Exception):
    """Says why a row of a known format is no text to learn from."""


class RowReader:
    """Writes rows as texts of a target, conversations by its chat template.

    Before each answer are the tokens that an engine reads there: where the tokenizer would join the end of a prompt and
    the beginning of an answer in a token, they are tokenized apart.

    Args:
        target: Path or hub name, for the tokenizer.
        max_tokens: Longest text that the target reads; longer ones are cut there.
    """

    def __init__(self, target: str, max_tokens: int) -> None:
        self.target = target
        self.max_tokens = max_tokens
        self.variables: dict[str, Any] = {"strftime_now": A_DAY.strftime}
        """Variables of the chat template."""

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The target's, loaded when text has to be written."""
        return load_tokenizer(self.target)

    @cached_property
    def template(self) -> str | None:
        """Writes conversations; None where there is text alone."""
        template: str | None = self.tokenizer.chat_template
        return template

    @cached_property
    def _ends(self) -> list[str]:
        """Words behind which the target's engine writes no more."""
        ends = [str(self.tokenizer.decode([token])) for token in end_token_ids(self.target, self.tokenizer)]
        return [end for end in ends if end.strip()]

    def read(self, rows: Iterable[Any], name: str) -> list[list[Text]]:
        """Return the texts of each row that has some; rows without an answer are left out with a warning.

        Args:
            rows: May be read as they are asked for.
            name: Where they come from, for messages.

        Raises:
            ValueError: A row has another format, or none has a text.
        """
        by_row: list[list[Text]] = []
        known: dict[int, int] = {}  # of each token one number in memory
        left_out: list[str] = []
        for number, row in enumerate(rows):
            try:
                texts = self.texts(row)
            except LeftOut as reason:
                left_out.append(f"row {number} (from 0), {reason}")
                continue
            except (ValueError, TypeError) as error:
                raise ValueError(f"Row {number} (from 0) of {name} {error}.") from error
            by_row.append([text._replace(ids=[*map(known.setdefault, text.ids, text.ids)]) for text in texts])
        if not by_row:
            raise ValueError(f"{name} holds no text to learn from: {[*left_out, 'it has no rows'][0]}.")
        if left_out:
            total = len(by_row) + len(left_out)
            log.warning("%d of %d rows of %s are left out, the first: %s.", len(left_out), total, name, left_out[0])
        return by_row

    def texts(self, row: Any) -> list[Text]:
        """Return a row's texts, mostly one.

        Raises:
            ValueError: It has no known format.
            LeftOut: It has one, and nothing to learn from.
        """
        columns = {name for name, value in row.items() if value is not None} if isinstance(row, Mapping) else set()
        if columns >= {"prompt_ids", "response_ids"}:
            ids = [*row["prompt_ids"], *row["response_ids"]]
            if {*map(type, ids)} - {int}:
                raise ValueError("has something else than whole numbers in `prompt_ids` or `response_ids`")
            start = len(row["prompt_ids"])
            others = tuple((start + at, start + at + length) for at, length in row.get("observed") or ())
            return [self._cut(Text(ids, start, others))]
        if "messages" in columns:
            return self._conversation(as_turns(row["messages"]))
        if "conversations" in columns:
            return self._conversation(as_turns(row["conversations"]))
        if columns >= {"prompt", "completion"}:
            prompt, completion = row["prompt"], row["completion"]
            return self._conversation([*as_turns(prompt, "user"), *as_turns(completion, "assistant")])
        has = f"has {', '.join(sorted(columns)) or 'nothing'}" if isinstance(row, Mapping) else f"is {row!r:.80}"
        raise ValueError(f"{has}; a row must have {FORMATS}")

    def _conversation(self, turns: Sequence[Turn]) -> list[Text]:
        is_plain = self.template is None and [turn["role"] for turn in turns] == ["user", "assistant"]
        if is_plain and _is_answer(turns[1]):
            return [self._cut(self._plain(*(turn["content"] for turn in turns)))]
        return self._written(turns)

    def _plain(self, prompt: str, completion: str) -> Text:
        ids, (length,) = self._encode(prompt + completion, [len(prompt)])
        whole = self.tokenizer(prompt + completion)["input_ids"]  # with what begins, and perhaps ends, every text
        front = whole[: next((at for at in range(len(whole)) if whole[at : at + len(ids)] == ids), 0)]
        return Text([*front, *ids, self.tokenizer.eos_token_id], len(front) + length)

    def _written(self, turns: Sequence[Turn]) -> list[Text]:
        """Write a conversation as the target's engine would have seen it, each answer behind all before it.

        Where the template writes earlier turns otherwise once there are later ones, as those that drop what was
        thought do, a new text begins: each answer follows what the engine reads before it.
        """
        texts: list[tuple[str, list[Span]]] = []
        for number, turn in enumerate(turns):
            if number == 0 or not _is_answer(turn):
                continue
            text, start = self._answer(turns[:number], turn)
            if start >= len(text):
                continue
            # Some templates, as Phi-3's, write more behind the end of the last answer; with some models, as Qwen2.5's
            # base, the template ends it with a word at which the engine goes on.
            ends = [at + len(end) for end in self._ends if (at := text.find(end, start)) >= 0]
            text = text[: min(ends)] if ends else text + str(self.tokenizer.eos_token)
            if not texts or not text.startswith(texts[-1][0]):
                texts.append(("", []))
            texts[-1] = text, [*texts[-1][1], (start, len(text))]
        if not texts:
            raise LeftOut("in which no `assistant` answers anything")
        return [self._cut(self._tokens(*text)) for text in texts]

    def _answer(self, earlier: Sequence[Turn], turn: Turn) -> tuple[str, int]:
        """Write a turn behind earlier ones; return all, and where it begins."""
        before, text = self._template(earlier, True), self._template([*earlier, turn]).rstrip()
        pairs = enumerate(zip(before, text, strict=False))
        start = next((place for place, (one, other) in pairs if one != other), len(before))
        if start < len(before) and start < len(self._template(earlier).rstrip()):
            raise LeftOut("whose chat template writes what is before an answer otherwise than with the answer")
        if _without_spaces(turn["content"]) in _without_spaces(text):
            return text, start
        # As DeepSeek-R1's, the template drops what was thought of every answer, which the engine wrote nevertheless.
        opened = before[start:].strip()
        end = self._template([*earlier, {**turn, "content": _MARK}]).rpartition(_MARK)[2].rstrip()
        return before + turn["content"].strip().removeprefix(opened).lstrip() + end, len(before)

    def _template(self, turns: Sequence[Turn], asks: bool = False) -> str:
        from jinja2 import TemplateError

        if self.template is None:
            raise ValueError(
                f"is a conversation, which `target` {self.target!r} has no chat template for; set its tokenizer's "
                "`chat_template`, or give the texts `prompt` and `completion`"
            )
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    list(turns),
                    tokenize=False,
                    add_generation_prompt=asks,
                    chat_template=self.template,
                    **self.variables,
                )
            )
        except (TemplateError, TypeError, KeyError) as error:
            raise LeftOut(f"which the target's chat template cannot write ({error})") from error

    def _tokens(self, text: str, spans: Sequence[Span]) -> Text:
        ids, edges = self._encode(text, [edge for span in spans for edge in span])
        others = tuple(zip(edges[1:-1:2], edges[2:-1:2], strict=True))
        return Text(ids, edges[0], others)

    def _encode(self, text: str, edges: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return the tokens of `text`, and how many of them are before each edge, a place in it."""
        if not self.tokenizer.is_fast:
            raise ValueError(
                f"holds text, and the tokenizer of `target` {self.target!r} is none of `tokenizers`, which tell where "
                "tokens begin; give `prompt_ids` and `response_ids`, as `predict` writes them"
            )
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise LeftOut("with half a surrogate pair, which is no letter") from error

        def encode(part: str) -> list[int]:
            ids: list[int] = self.tokenizer(part, add_special_tokens=False)["input_ids"]
            return ids

        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids, starts = encoded["input_ids"], [first for first, _ in encoded["offset_mapping"]]
        places = [bisect_left(starts, edge) for edge in edges]
        if all(encode(text[:edge]) == ids[:place] for edge, place in zip(edges, places, strict=True)):
            return ids, places
        parts = [encode(text[first:last]) for first, last in pairwise([0, *edges, len(text)])]
        return [*chain.from_iterable(parts)], [*accumulate(map(len, parts[:-1]))]

    def _cut(self, text: Text) -> Text:
        if not 0 < text.prompt_length < min(len(text.ids), self.max_tokens):
            raise LeftOut(f"of {text.prompt_length} tokens before an answer, which has to end within {self.max_tokens}")
        others = tuple((start, min(stop, self.max_tokens)) for start, stop in text.others if start < self.max_tokens)
        return Text(text.ids[: self.max_tokens], text.prompt_length, others)


def _without_spaces(text: str) -> str:
    return "".join(text.split())


def _is_answer(turn: Turn) -> bool:
    """Return True for a turn in which an assistant says or calls something: an empty cell of a table is no answer."""
    said = (str(value) for name, value in turn.items() if value and name != "role")
    return turn["role"] == "assistant" and any(map(str.strip, said))


def as_turns(value: Any, role: str = "") -> list[Turn]:
    """Return turns with `role` and `content`; text alone is a turn of `role`."""
    if isinstance(value, str) and role:
        return [{"role": role, "content": value}]
    turns = []
    for given in value if isinstance(value, list) else [value]:
        turn = {name: each for name, each in given.items() if each is not None} if isinstance(given, dict) else {}
        if "from" in turn and "role" not in turn:
            turn = {"role": _ROLES.get(turn["from"], turn["from"]), "content": turn.get("value")}
        if not isinstance(turn.get("role"), str) or not isinstance(turn.get("content"), str):
            raise LeftOut(f"with {given!r:.80} in the place of a turn, which has texts as `role` and `content`")
        turns.append(turn)
    return turns
