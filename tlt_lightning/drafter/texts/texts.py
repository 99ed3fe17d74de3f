"""Hold where texts lie, and their lengths: a million long ones take some 40 MB."""

from __future__ import annotations

import json
import logging
import random
from array import array
from collections.abc import Hashable, Sequence
from hashlib import blake2b
from typing import Any

from typing_extensions import override

from tlt_lightning.data.formats import LeftOut, RowReader, Text
from tlt_lightning.drafter.texts.rows import JsonLines, open_rows

log = logging.getLogger(__name__)

_COLUMNS = ("lengths", "prompts", "_sources", "_rows", "_parts")


class Texts(Sequence[Text]):
    """Makes texts from the rows that they are in whenever they are asked for, for each is read anew from its place.

    All are read once at the start: ValueError unless they are of a known format, and the target's tokens. Rows of a
    known format without an answer are left out with a warning.

    Args:
        paths: Files, folders or hub datasets.
        reader: Of their rows.
        vocab_size: Tokens of the target.
        config: Configuration of a hub dataset.
        split: Split to read.
    """

    def __init__(
        self, paths: Sequence[str], reader: RowReader, vocab_size: int, config: str | None = None, split: str = "train"
    ) -> None:
        self.paths, self.reader = paths, reader
        self._opened = [open_rows(path, config, split) for path in paths]
        self.lengths, self.prompts = array("q"), array("Q")  # tokens, and a hash of the row's prompt
        self._sources, self._rows, self._parts = array("H"), array("q"), array("H")
        self._num_left_out, self._why = 0, ""
        for source, rows in enumerate(self._opened):
            for row in range(len(rows)):
                self._read(source, row, vocab_size)
        if not self.lengths:
            raise ValueError(f"`completions` {', '.join(paths)} hold no text: {self._why or 'they have no rows'}.")
        if self._num_left_out:
            total = sum(map(len, self._opened))
            log.warning("%d of %d rows are left out, the first: %s.", self._num_left_out, total, self._why)

    def _read(self, source: int, row: int, vocab_size: int) -> None:
        try:
            texts = self.reader.texts(self._opened[source][row])
        except LeftOut as error:
            self._num_left_out += 1
            self._why = self._why or f"{self._place(source, row)} {error}"
            return
        except json.JSONDecodeError as error:
            raise ValueError(f"{self._place(source, row)} is no JSON: {error.msg} at column {error.colno}.") from error
        except (ValueError, TypeError) as error:
            raise ValueError(f"{self._place(source, row)} {error}.") from error
        for part, text in enumerate(texts):
            if min(text.ids) < 0 or max(text.ids) >= vocab_size:
                raise ValueError(
                    f"{self._place(source, row)} holds tokens that the target's vocabulary of {vocab_size} has not: "
                    "they are another model's."
                )
            self.lengths.append(len(text.ids))
            prompt = str(texts[0].prompt).encode()  # of the row: no conversation is on both sides of a split
            self.prompts.append(int.from_bytes(blake2b(prompt, digest_size=8).digest(), "little"))
            self._sources.append(source)
            self._rows.append(row)
            self._parts.append(part)

    def _place(self, source: int, row: int) -> str:
        rows = self._opened[source]
        where = f"line {rows.line(row)}" if isinstance(rows, JsonLines) else f"row {row}"
        return f"`completions` {self.paths[source]!r}, {where},"

    def part(self, rows: Sequence[int]) -> Texts:
        """Return the texts of some rows."""
        part = Texts.__new__(Texts)
        part.paths, part.reader, part._opened = self.paths, self.reader, self._opened
        for name in _COLUMNS:
            values: array[int] = getattr(self, name)
            setattr(part, name, array(values.typecode, (values[row] for row in rows)))
        return part

    @override
    def __len__(self) -> int:
        return len(self.lengths)

    @override
    def __getitem__(self, row: Any) -> Any:
        return self.reader.texts(self._opened[self._sources[row]][self._rows[row]])[self._parts[row]]


def split_by_prompt(keys: Sequence[Hashable], val_share: float, seed: int) -> tuple[list[int], list[int]]:
    """Split texts, given a key of each one's prompt, into rows to train on and held-out ones.

    No prompt is on both sides.
    """
    prompts = sorted(set(keys))  # type: ignore[type-var]
    if len(prompts) < 2:
        raise ValueError(
            f"`completions` answer {len(prompts)} prompt(s); at least one to train on and one to hold out."
        )
    num_held_out = min(len(prompts) - 1, max(1, round(val_share * len(prompts))))
    held_out = set(random.Random(seed).sample(prompts, num_held_out))
    parts: tuple[list[int], list[int]] = ([], [])
    for row, key in enumerate(keys):
        parts[key in held_out].append(row)
    return parts
