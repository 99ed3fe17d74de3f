"""Read prompts, turn them into token ids, and say in which order iterations use them."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from tlt_lightning.data.batch import Prompt

if TYPE_CHECKING:
    from jinja2 import Template
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

_READERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}


@dataclass(frozen=True, kw_only=True)
class PromptSource:
    """Name a data set and the way from its rows to prompts.

    Args:
        path: A JSONL or Parquet file, or the name of a dataset on the hub.
        split: Split of a hub dataset.
        config: Configuration of a hub dataset, for example `main` of GSM8K.
        prompt_column: Column with the question.
        answer_column: Column with the answer that rewards compare to; None if they need none.
        template: Jinja template over the row that writes the question, for rows whose question is spread over several
            columns; replaces `prompt_column`.
        system_prompt: Put before the question when the tokenizer has a chat template.
        chat: Apply the tokenizer's chat template; None applies it if there is one.
    """

    path: str
    split: str = "train"
    config: str | None = None
    prompt_column: str = "prompt"
    answer_column: str | None = "answer"
    template: str | None = None
    system_prompt: str | None = None
    chat: bool | None = None

    def __post_init__(self) -> None:
        if Path(self.path).suffix in _READERS and not Path(self.path).is_file():
            raise FileNotFoundError(f"`path` {self.path!r} does not exist (from {Path.cwd()}).")

    def rows(self) -> list[dict[str, Any]]:
        """Read all rows; raises ValueError if there are none or a column is missing."""
        from datasets import load_dataset

        suffix = Path(self.path).suffix
        if suffix in _READERS:
            if Path(self.path).stat().st_size == 0:
                raise ValueError(f"`path` {self.path!r} holds no rows.")
            dataset = load_dataset(_READERS[suffix], data_files=self.path, split="train")
        else:
            dataset = load_dataset(self.path, self.config, split=self.split)
        if not len(dataset):
            raise ValueError(f"`path` {self.path!r} holds no rows.")
        wanted = [] if self.template else [self.prompt_column]
        wanted += [] if self.answer_column is None else [self.answer_column]
        for column in wanted:
            if column not in dataset.column_names:
                raise ValueError(
                    f"`path` {self.path!r} has no column {column!r}; it has {', '.join(dataset.column_names)}. Set "
                    "`prompt_column` or `answer_column` (null if there is no answer)."
                )
        return [dict(row) for row in dataset]

    def question(self, row: dict[str, Any]) -> str:
        """Return the question of a row, before any chat template."""
        if self.template is None:
            return str(row[self.prompt_column])
        return _compiled(self.template).render(**row)


@cache
def _compiled(template: str) -> Template:
    from jinja2 import StrictUndefined
    from jinja2.sandbox import SandboxedEnvironment

    return SandboxedEnvironment(undefined=StrictUndefined).from_string(template)


def load_prompts(
    source: PromptSource,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_prompt_tokens: int,
    too_long: Literal["drop", "error"] = "drop",
) -> list[Prompt]:
    """Read, template and tokenise the prompts of `source`.

    Args:
        source: Where they are.
        tokenizer: The policy's.
        max_prompt_tokens: Longest prompt in tokens.
        too_long: What to do with longer ones: `drop` counts and reports them, `error` raises ValueError.
    """
    use_chat = tokenizer.chat_template is not None if source.chat is None else source.chat
    if use_chat and tokenizer.chat_template is None:
        raise ValueError("`chat: true`, but the policy's tokenizer has no chat template; set `chat: false`.")
    if source.system_prompt is not None and not use_chat:
        raise ValueError("`system_prompt` needs a chat template; set `chat: true`, or write it into `template`.")
    prompts, num_dropped, longest = [], 0, 0
    for index, row in enumerate(source.rows()):
        text = question = source.question(row)
        if use_chat:
            messages = [{"role": "user", "content": question}]
            if source.system_prompt is not None:
                messages.insert(0, {"role": "system", "content": source.system_prompt})
            text = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        ids = tokenizer(text, add_special_tokens=not use_chat)["input_ids"]
        if not ids:
            raise ValueError(f"Row {index} of {source.path!r} gives an empty prompt.")
        if len(ids) > max_prompt_tokens:
            num_dropped, longest = num_dropped + 1, max(longest, len(ids))
            continue
        answer = None if source.answer_column is None else row[source.answer_column]
        row = {**row, "answer": answer}
        prompts.append(Prompt(text=text, ids=ids, question=question, answer=answer, row=row, index=index))
    if num_dropped:
        report = (
            f"{num_dropped} of {num_dropped + len(prompts)} prompts of {source.path!r} are longer than "
            f"`max_prompt_tokens` {max_prompt_tokens}; the longest has {longest} tokens."
        )
        if too_long == "error":
            raise ValueError(f"{report} Raise `max_prompt_tokens`, or set `too_long: drop` to leave them out.")
        log.warning("%s They are left out.", report)
    if not prompts:
        raise ValueError(f"No prompt of {source.path!r} is left within `max_prompt_tokens` {max_prompt_tokens}.")
    return prompts


class PromptCursor:
    """Order prompts: shuffled anew each pass, the same for every number of ranks.

    Args:
        num_prompts: How many there are.
        seed: Makes the order reproducible.
    """

    def __init__(self, num_prompts: int, seed: int) -> None:
        self.num_prompts = num_prompts
        self.seed = seed
        self.position = 0  # prompts handed out since the start, over all ranks
        self._cached_epoch, self._cached = -1, [0]

    def take(self, count: int, *, rank: int = 0, world_size: int = 1) -> list[int]:
        """Move on by `count` prompts and return this rank's share, every `world_size`-th of them."""
        positions = range(self.position, self.position + count)
        self.position += count
        return [self._prompt_at(position) for position in positions][rank::world_size]

    def _prompt_at(self, position: int) -> int:
        epoch, offset = divmod(position, self.num_prompts)
        return self._permutation(epoch)[offset]

    def _permutation(self, epoch: int) -> list[int]:
        if self._cached_epoch != epoch:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            self._cached_epoch = epoch
            self._cached = torch.randperm(self.num_prompts, generator=generator).tolist()
        return self._cached
