"""Reach the rows of files and datasets one by one, wherever they lie, without holding them."""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from typing_extensions import override

from tlt_lightning.data.rows import kind, load_split, ranges, saved_splits

_BUILDERS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}


class JsonLines(Sequence[Any]):
    """Reads the values of a .jsonl from their places in it, whenever they are asked for; blank lines hold none."""

    def __init__(self, path: Path, split: str = "train") -> None:
        self.path = path
        self._starts = array("q")
        start = 0
        with path.open("rb") as file:
            for line in file:  # ends at "\n" alone, unlike `str.splitlines`
                if line.strip():
                    self._starts.append(start)
                start += len(line)
        if split != "train":
            parts = ranges(str(path), {"train": len(self._starts)}, split)
            self._starts = array("q", (self._starts[row] for _, rows in parts for row in rows))

    @override
    def __len__(self) -> int:
        return len(self._starts)

    @override
    def __getitem__(self, row: Any) -> Any:
        with self.path.open("rb") as file:
            file.seek(self._starts[row])
            return json.loads(file.readline())

    def line(self, row: int) -> int:
        """Return the number of a row's line, from 1."""
        left, number = self._starts[row], 1
        with self.path.open("rb") as file:
            while left > 0:
                left, number = left - len(file.readline()), number + 1
        return number


def open_rows(path: str, config: str | None, split: str) -> Sequence[Any]:
    """Return the rows of a split: of a .jsonl by their places in it, else of `datasets`' memory map.

    Raises:
        ValueError: `datasets` cannot read it.
    """
    place = Path(path).expanduser()
    if place.is_file() and place.suffix == ".jsonl":
        return JsonLines(place, split)
    from datasets import concatenate_datasets, load_dataset
    from datasets.exceptions import DatasetGenerationError

    try:
        if place.is_file():
            return load_dataset(_BUILDERS[kind(place)], data_files=str(place), split=split)
        if (splits := saved_splits(place)) is None:
            return load_split(path, config, split)
    except (DatasetGenerationError, OSError, ValueError, StopIteration) as error:
        reason = (str(error.__cause__ or error) or "it holds nothing").splitlines()[0]
        raise ValueError(
            f"`completions` {path!r} cannot be read (`split` {split!r}, `config` {config}): {reason}"
        ) from error
    parts = ranges(path, {name: len(rows) for name, rows in splits.items()}, split)
    return concatenate_datasets([splits[name].select(rows) for name, rows in parts])
