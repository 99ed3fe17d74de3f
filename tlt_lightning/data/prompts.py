"""Read prompts, turn them into token ids, and order them for the iterations."""

import logging
import random
import zlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.seed import isolate_rng

from tlt_lightning.arguments import checked, text_of
from tlt_lightning.data.formats import A_DAY, Text
from tlt_lightning.data.rows import Row, RowSource, check_path, complete, cut, plain, read_rows
from tlt_lightning.environments.environments import Environments
from tlt_lightning.environments.turns import Message, Turns
from tlt_lightning.rollout import Prompt

if TYPE_CHECKING:
    from jinja2 import Template
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

T = TypeVar("T")


@checked()
@dataclass(frozen=True, kw_only=True)
class PromptSource:
    """Names a data set and the way from its rows to prompts.

    A prompt is text, or a conversation: messages with `role` and `content`, which the tokenizer's chat template writes
    as they are. Rewards receive a conversation's last message as the prompt, and all of it in the row.

    Args:
        path: A file (.jsonl, .json, .csv, each perhaps .gz; .parquet), a `datasets` folder, or a hub dataset.
        rows: Rows in the place of a path: a list of dictionaries, a `datasets.Dataset`, or a source of rows such as
            `tlt_lightning.tasks.ReasoningGym`, in YAML with `class_path` and `init_args`.
        split: Split to read, or slices such as `train[:100]`; files and rows are all `train`.
        config: Configuration of a hub dataset, for example `main` of GSM8K.
        prompt_column: Column with the question.
        answer_column: Column with the answer that rewards compare to, in their row as `answer`; None changes no row.
        template: Jinja template that writes the question from several columns of the row; replaces `prompt_column`.
        system_prompt: Put before the question when the tokenizer has a chat template.
        chat: Apply the tokenizer's chat template; None applies it if there is one.
        chat_template: Jinja template of a conversation in the place of the tokenizer's, or the path of a `.jinja` file.
        chat_template_kwargs: Variables of the chat template, for example `enable_thinking: false` for Qwen3.
    """

    path: str | None = None
    # A plain `dict`: with `Any` in it, the command line would read the text '5' as a number.
    rows: "RowSource | Sequence[dict] | None" = field(default=None, repr=False)
    split: str = "train"
    config: str | None = None
    prompt_column: Annotated[str, "Give the name of a column."] = "prompt"
    answer_column: str | None = "answer"
    template: str | None = None
    system_prompt: str | None = None
    chat: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: Annotated[dict | None, "Give names and values."] = None

    def __post_init__(self) -> None:
        if bool(self.path) == (self.rows is not None):
            neither = "neither `path` nor `rows`: give one, or null for the whole source, as in `--data.val null`."
            both = f"`path` {self.path!r} and `rows`, too: set one of them to null."
            raise ValueError(f"A prompt source has {both if self.path else neither}")
        if (self.chat_template or "").endswith(".jinja"):
            place = Path(str(self.chat_template)).expanduser()
            if not place.is_file():
                raise FileNotFoundError(f"`chat_template` {self.chat_template!r} does not exist (from {Path.cwd()}).")
            object.__setattr__(self, "chat_template", place.read_text())
        for name, value in (self.chat_template_kwargs or {}).items():
            if isinstance(value, str) and value.lower() in ("true", "false", "null", "none"):  # true in a template
                raise ValueError(
                    f"`chat_template_kwargs.{name}` is the text {value!r}; on a command line give the variables "
                    f"together, as in --data.train.chat_template_kwargs '{{{name}: {value}}}'."
                )
        if self.rows is None:
            object.__setattr__(self, "path", text_of("path", self.path, "Give a file, a folder or a hub name."))
            check_path(str(self.path))
        elif got := _no_rows(self.rows):
            raise TypeError(
                "Prompts must be a `PromptSource`, a path, a list of dictionaries or one split of a "
                f"`datasets.Dataset`, got {got}."
            )

    @classmethod
    def of(cls, data: Any) -> "PromptSource":
        """Make a source with the usual columns of a path, a `datasets.Dataset` or a list of rows."""
        if isinstance(data, PromptSource):
            return data
        return cls(path=str(data)) if isinstance(data, str | Path) else cls(rows=data)

    @property
    def name(self) -> str:
        """Name the data in messages."""
        return f"`path` {self.path!r}" if self.path else "`rows`"

    def read(self) -> list[Row]:
        """Read all rows; raise ValueError if there are none or a column is missing."""
        rows = self.read_rows()
        for column in (None if self.template else self.prompt_column, self.answer_column):
            if column is not None and column not in rows[0]:
                raise ValueError(
                    f"{self.name} has no column {column!r}; it has {', '.join(rows[0])}. Set `prompt_column` or "
                    "`answer_column` (null if there is no answer)."
                )
        return rows

    def read_rows(self) -> list[Row]:
        """Read all rows, whatever columns they have; raise ValueError if there are none."""
        if self.rows is None:
            rows = read_rows(str(self.path), self.config, self.split)
        else:
            rows = complete(cut("rows", {"train": self.rows}, self.split))
        if not rows:
            raise ValueError(f"`split` {self.split!r} of {self.name} holds no rows; choose one that does.")
        return [plain(row) for row in rows]

    def asked(self, row: Row) -> Any:
        """Return what a row asks: what `template` writes of it, or its prompt column."""
        return _compiled(self.template).render(**row) if self.template else row[self.prompt_column]

    def messages(self, row: Row) -> list[Message]:
        """Return a row's conversation up to its question, untemplated; raise ValueError without one."""
        prompt = self.asked(row)
        if isinstance(prompt, str) and prompt.strip():
            prompt = [{"role": "user", "content": prompt}]
        if not _is_conversation(prompt):
            raise ValueError(
                f"must hold text or a list of messages, each with `role` and `content` as text (no images), got "
                f"{prompt!r:.200}; fill it in, or leave the row out of the data (rows count from 0)"
            )
        if prompt[-1]["role"] == "assistant":
            raise ValueError(f"ends with what the assistant says, {prompt[-1]['content']!r:.200}; leave the answer out")
        return self.with_system(_without_missing(prompt))

    def with_system(self, turns: list[Message]) -> list[Message]:
        """Return a conversation behind `system_prompt`, if there is one; raise ValueError if it has one of its own."""
        if self.system_prompt is None:
            return turns
        if turns[0]["role"] == "system":
            raise ValueError("has a system message of its own; leave `system_prompt` out")
        return [{"role": "system", "content": self.system_prompt}, *turns]


def _no_rows(rows: Any) -> str:
    """Describe what is given in the place of rows; return "" for rows. Of a data set only the first is read."""
    kind, is_list = type(rows).__name__, isinstance(rows, list | tuple)
    if not hasattr(rows, "__len__"):
        return kind
    wrong = [each for each in enumerate(rows if is_list else islice(rows, 1)) if not isinstance(each[1], dict)]
    if not wrong:
        return ""
    return f"{kind}, whose row {wrong[0][0]} is {wrong[0][1]!r:.200}" if is_list else kind


def _is_conversation(prompt: Any) -> bool:
    return (
        isinstance(prompt, list)
        and len(prompt) > 0
        and all(isinstance(turn, dict) for turn in prompt)
        and all(isinstance(turn.get(key), str) for turn in prompt for key in ("role", "content"))
    )


def _without_missing(value: Any) -> Any:
    """Leave out keys whose value is None: Arrow gives every message all keys that any of the data's messages has."""
    if isinstance(value, dict):
        return {name: _without_missing(inner) for name, inner in value.items() if inner is not None}
    return [_without_missing(inner) for inner in value] if isinstance(value, list) else value


@cache
def _compiled(template: str) -> "Template":
    from jinja2 import StrictUndefined
    from jinja2.sandbox import SandboxedEnvironment

    return SandboxedEnvironment(undefined=StrictUndefined).from_string(template)


def load_prompts(
    source: PromptSource,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    max_prompt_tokens: int,
    turns: Turns | None = None,
    seed: int = 0,
) -> list[Prompt]:
    """Read, template and tokenise the prompts of `source`; warn of those left out as too long.

    What a template computes anew is always the same: the date is `A_DAY`, and random choices hang on the seed.

    Args:
        source: The rows and how they are read.
        tokenizer: The policy's.
        max_prompt_tokens: Longest prompt in tokens.
        turns: Writes them; None is what `turns_of` returns.
        seed: Seeds the random choices that a template makes.
    """
    turns = turns or turns_of(source, tokenizer)
    prompts, num_dropped, longest = [], 0, 0
    known: dict[int, int] = {}  # of each token one number in memory, in tuples, which the garbage collector passes over
    rows = source.read()
    with isolate_rng(include_cuda=False):  # Jinja's filter `random` draws from Python's own generator
        random.seed(seed)
        written = [_write(source, turns, index, row) for index, row in enumerate(rows)]
    for index, (row, (question, text)) in enumerate(zip(rows, written, strict=True)):
        tokens = turns.ids(text)
        ids = tuple(map(known.setdefault, tokens, tokens))
        if not ids:
            raise ValueError(f"Row {index} of {source.name} (from 0) gives an empty prompt; leave it out of the data.")
        if len(ids) > max_prompt_tokens:
            num_dropped, longest = num_dropped + 1, max(longest, len(ids))
            continue
        answer = None
        if source.answer_column is not None:
            answer = row["answer"] = row[source.answer_column]
        prompts.append(Prompt(text=text, ids=ids, question=question, answer=answer, row=row, index=index))
    if num_dropped:
        log.warning(
            "%d of %d prompts of %s are left out: they are longer than the %d tokens that `max_prompt_tokens`, or the "
            "context beside a response, has room for. The longest has %d.",
            *(num_dropped, num_dropped + len(prompts), source.name, max_prompt_tokens, longest),
        )
    if not prompts:
        raise ValueError(f"No prompt of {source.name} is left within `max_prompt_tokens` {max_prompt_tokens}.")
    return prompts


def turns_of(
    source: PromptSource,
    tokenizer: "PreTrainedTokenizerBase",
    end_tokens: Collection[int] = (),
    environments: Environments | None = None,
    stop_tokens: Collection[int] = (),
) -> Turns:
    """Return what writes conversations as the source wants them, with tools of environments if there are any.

    ValueError if conversations with environments could not go on.
    """
    variables = {"strftime_now": A_DAY.strftime, **(source.chat_template_kwargs or {})}
    tools = [] if environments is None else [*environments.tools.values()]
    turns = Turns(tokenizer, chat_template_of(source, tokenizer), variables, end_tokens, tools, stop_tokens)
    if environments is not None:
        turns.check()
    return turns


def _write(source: PromptSource, turns: Turns, index: int, row: Row) -> tuple[str, str]:
    """Return a row's question and its whole prompt; raise ValueError that names row and column."""
    try:
        messages = source.messages(row)
        text = turns.prompt(messages)
        text.encode()  # a lone surrogate has no bytes, and no tokens
    except Exception as error:  # a template raises whatever its filters and Python's methods raise
        column = "`template`" if source.template else f"`prompt_column` {source.prompt_column!r}"
        raise ValueError(f"Row {index} of {source.name}: {column} {error}.") from error
    return messages[-1]["content"], text


def chat_template_of(source: PromptSource, tokenizer: "PreTrainedTokenizerBase") -> str | None:
    """Return the template that writes conversations; None where prompts are plain text.

    Raises:
        ValueError: The source asks for chat without a template, or has settings of chat without asking for it.
    """
    template = source.chat_template or tokenizer.chat_template
    use_chat = template is not None if source.chat is None else source.chat
    if use_chat and template is None:
        raise ValueError(
            "`chat: true`, but the policy's tokenizer has no chat template; give `chat_template`, or set `chat: false`."
        )
    if not use_chat and (source.system_prompt is not None or source.chat_template or source.chat_template_kwargs):
        raise ValueError(
            "`system_prompt`, `chat_template` and `chat_template_kwargs` are for chat; set `chat: true` (and give a "
            "`chat_template` if the tokenizer has none), or write them into `template`."
        )
    return template if use_chat else None


def checksum(prompts: Sequence[Prompt | Text]) -> int:
    """Return a number that tells other token ids, or the same in another order, from these."""
    number = 0
    for prompt in prompts:
        number = zlib.crc32(repr([*prompt.ids]).encode(), number)
    return number


def first_prompts(prompts: list[T], kept: float) -> list[T]:
    """Return the first prompts or texts, in the number or share of `Trainer(overfit_batches=kept)`; 0 returns all.

    Raises:
        MisconfigurationException: If nothing is left.
    """
    if not kept:
        return prompts
    number = int(kept * len(prompts)) if isinstance(kept, float) else kept
    if not number:
        raise MisconfigurationException(f"`Trainer(overfit_batches={kept})` leaves none of {len(prompts)} prompts.")
    return prompts[:number]


@dataclass(slots=True)
class PromptCursor:
    """Orders prompts: shuffled anew each pass, the same for every number of ranks.

    Args:
        num_prompts: How many there are.
        seed: Makes the order reproducible.
        position: Prompts handed out since the start, over all ranks.
    """

    num_prompts: int
    seed: int
    position: int = 0

    def peek(self, count: int) -> list[int]:
        """Return the next `count` prompts; whoever takes them moves `position` on."""
        places = (divmod(self.position + number, self.num_prompts) for number in range(count))
        return [_permutation(self.num_prompts, self.seed * 1_000_003 + epoch)[offset] for epoch, offset in places]


@lru_cache(maxsize=1)
def _permutation(length: int, seed: int) -> list[int]:
    return torch.randperm(length, generator=torch.Generator().manual_seed(seed)).tolist()
