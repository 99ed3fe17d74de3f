"""Read the texts that a policy imitates: the rows of a source, each with its answers."""

import logging
from dataclasses import replace
from functools import cached_property

from typing_extensions import override

from tlt_lightning.data.formats import FORMATS, RowReader, Text, Turn, as_turns
from tlt_lightning.data.prompts import PromptSource, chat_template_of
from tlt_lightning.data.rows import Row

log = logging.getLogger(__name__)


class AnsweredRows(RowReader):
    """Writes the rows of a source as texts with answers, prompts as `load_prompts` writes them for an engine.

    Args:
        source: Names the columns, and says how conversations are written. `answer_column` holds text or turns, which
            follow the prompt; rows without it hold all in one column.
        policy: Path or hub name, for the tokenizer.
        max_tokens: Longest text; longer ones are cut there.
    """

    def __init__(self, source: PromptSource, policy: str, max_tokens: int) -> None:
        super().__init__(policy, max_tokens)
        self.variables |= source.chat_template_kwargs or {}
        self.rows = source.read_rows()
        columns = self.rows[0].keys()
        self._answer_column = next((name for name in (source.answer_column, "completion") if name in columns), None)
        asked = [source.prompt_column] if self._answer_column else []
        known = [name for name in (*asked, "messages", "conversations", source.prompt_column) if name in columns]
        self._holds_tokens = columns >= {"prompt_ids", "response_ids"}
        if not (known or source.template or self._holds_tokens):
            raise ValueError(
                f"{source.name} has the columns {', '.join(columns)}; a row must have {FORMATS}, or what "
                "`prompt_column` and `answer_column` name."
            )
        self.source = source if source.template or not known else replace(source, prompt_column=known[0])

    @cached_property
    @override
    def template(self) -> str | None:
        return chat_template_of(self.source, self.tokenizer)

    def read_all(self) -> list[Text]:
        """Return the texts of all rows, see `read`, with a warning if some are cut."""
        texts = [text for row in self.read(self.rows, self.source.name) for text in row]
        if num_cut := sum(len(text.ids) == self.max_tokens for text in texts):
            log.warning(
                "%d of %d texts of %s reach `max_tokens` %d, where they are cut: their ends are not learned.",
                *(num_cut, len(texts), self.source.name, self.max_tokens),
            )
        return texts

    @override
    def texts(self, row: Row) -> list[Text]:
        return super().texts(row) if self._holds_tokens else self._conversation(self._turns(row))

    def _turns(self, row: Row) -> list[Turn]:
        turns = as_turns(self.source.asked(row), "user")
        if self._answer_column is not None and turns[-1:] and turns[-1]["role"] != "assistant":
            turns += as_turns(row[self._answer_column], "assistant")
        return self.source.with_system(turns)
