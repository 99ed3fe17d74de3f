"""Read the rows of a data file, folder or hub dataset as they are written there."""

import csv
import gzip
import json
import re
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import IO, Any

Row = dict[str, Any]

KINDS = (".jsonl", ".json", ".csv", ".parquet")
READABLE = "a .jsonl, .json, .csv (each perhaps .gz) or .parquet file, a folder, or a hub dataset as `owner/name`"
OTHER_KINDS = (".gz", ".txt", ".tsv", ".arrow", ".zip", ".xz", ".bz2", ".zst", ".ndjson", ".yaml", ".xlsx", ".pkl")


class RowSource(ABC):
    """Makes rows in the place of a file; the command line names one by its class path."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of rows."""

    @abstractmethod
    def __getitem__(self, index: int) -> Row:
        """Return a row, the same whenever asked."""

    def __iter__(self) -> Iterator[Row]:
        return (self[index] for index in range(len(self)))


def check_path(path: str, argument: str = "path") -> None:
    """Raise FileNotFoundError or ValueError, naming `argument`, unless `path` is readable, or perhaps on the hub."""
    place = Path(path).expanduser()
    if place.is_file():
        if kind(place) not in KINDS:
            raise ValueError(f"`{argument}` {path!r} has no known suffix; it must be {READABLE}.")
    elif not place.is_dir():
        is_hub_name = re.fullmatch(r"[\w.-]+(/[\w.-]+)?", path) and place.suffix not in (*KINDS, *OTHER_KINDS)
        if not is_hub_name or ("/" in path and place.parent.is_dir()) or path.startswith("."):
            raise FileNotFoundError(f"`{argument}` {path!r} does not exist (from {Path.cwd()}); it must be {READABLE}.")


def kind(path: Path) -> str:
    """Return the suffix of a file, that of compression aside."""
    return (path.with_suffix("") if path.suffix == ".gz" else path).suffix


def read_rows(path: str, config: str | None, split: str) -> list[Row]:
    """Read the rows of `split`, None for columns that a row lacks and others have.

    JSON and `datasets` keep their types; CSV holds text only. Raises ValueError for a bad file or line, or an unknown
    split.
    """
    return complete(each_row(path, config, split))


def each_row(path: str, config: str | None, split: str) -> Iterator[Row]:
    """Yield the rows of `split` as they are read, see `read_rows`, with the columns that each has."""
    place = Path(path).expanduser()
    if place.is_file():
        rows = _read_file(place)
        yield from rows if split == "train" else cut(path, {"train": list(rows)}, split)
    elif any((place / name).is_file() for name in ("dataset_dict.json", "state.json")):
        yield from cut(path, _saved_splits(place), split)
    else:
        yield from map(dict, _load_split(path, config, split))


def _saved_splits(place: Path) -> dict[str, Any]:
    """Return the splits of a folder that `datasets` has saved, memory-mapped."""
    from datasets import DatasetDict, load_from_disk

    saved = load_from_disk(str(place))
    return dict(saved) if isinstance(saved, DatasetDict) else {"train": saved}


def _load_split(path: str, config: str | None, split: str) -> Any:
    """Return a split of a folder of files or of a hub dataset, memory-mapped; raise ValueError if there is none."""
    from datasets import load_dataset
    from datasets.exceptions import DatasetsError

    place = Path(path).expanduser()
    try:
        return load_dataset(str(place) if place.is_dir() else path, config, split=split)
    except (DatasetsError, OSError, ValueError) as error:  # a name, the network, a folder, a file in it
        reason, *_ = str(error).splitlines() or [type(error).__name__]
        raise ValueError(
            f"`path` {path!r} (`config` {config!r}, `split` {split!r}) cannot be read, says `datasets`: "
            f"{reason}. It must be {READABLE}."
        ) from error


def plain(value: Any) -> Any:
    """Return a value of a row with Python's own numbers and lists in the place of tensors, arrays and NumPy's numbers.

    A reward compares `5` with a text; `tensor(5)` or `int64(5)` would never be equal to one.
    """
    if isinstance(value, dict):
        return {name: plain(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [plain(inner) for inner in value]
    return value.tolist() if hasattr(value, "tolist") else value


def complete(rows: Iterable[Row]) -> list[Row]:
    """Give every row every column, None where it lacks one."""
    rows = list(rows)
    columns = dict.fromkeys(column for row in rows for column in row)
    return [{**columns, **row} for row in rows]


def cut(path: str, splits: Mapping[str, Any], split: str) -> Iterator[Row]:
    """Yield the rows of a split or of slices, such as `train[:100]` or `train[:10%]+test`."""
    if split in splits:
        yield from map(dict, islice(splits[split], len(splits[split])))  # PyTorch's data sets end nowhere else
        return
    from datasets import ReadInstruction

    try:
        parts = ReadInstruction.from_spec(split).to_absolute({name: len(rows) for name, rows in splits.items()})
    except ValueError as error:
        raise ValueError(
            f"`split` {split!r} of {path!r} must be {' or '.join(map(repr, splits))}, or a slice such as "
            f"'{next(iter(splits))}[:100]': {error}"
        ) from error
    for part in parts:
        yield from (dict(splits[part.splitname][row]) for row in range(part.from_, part.to))


def _read_file(path: Path) -> Iterator[Row]:
    if kind(path) == ".parquet":
        from pyarrow import ArrowInvalid, parquet

        try:
            yield from parquet.read_table(path).to_pylist()
        except ArrowInvalid as error:
            raise ValueError(f"`path` {str(path)!r} is damaged, or no .parquet file: {error}.") from error
        return
    opener: Any = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8-sig", newline="" if kind(path) == ".csv" else None) as file:
            yield from _read_csv(path, file) if kind(path) == ".csv" else _read_json(path, file)
    except UnicodeDecodeError as error:
        raise ValueError(f"`path` {str(path)!r} is not UTF-8 ({error.reason}); save it in that encoding.") from error
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"`path` {str(path)!r} is damaged, or no .gz file: {error}.") from error


def _read_csv(path: Path, file: Iterable[str]) -> Iterator[Row]:
    reader = csv.DictReader(file, strict=True)
    try:
        names = list(reader.fieldnames or ())
        if repeated := [name for name in dict.fromkeys(names) if names.count(name) > 1]:  # the last would hide others
            raise csv.Error(f"it names the column {repeated[0]!r} more than once; rename or drop one")
        for row in reader:
            if None in row or None in row.values():
                raise csv.Error(f"it has not the {len(names)} columns of the first line")
            yield row
    except csv.Error as error:
        raise ValueError(f"Line {reader.line_num} of `path` {str(path)!r} cannot be read: {error}.") from error


def _read_json(path: Path, file: IO[str]) -> Iterator[Row]:
    """Read a list of objects, or an object from each line that is not blank."""
    is_list = kind(path) == ".json" and file.read(1000).lstrip().startswith("[")
    file.seek(0)
    for number, text in [(1, file.read())] if is_list else enumerate(file, start=1):
        if not text.strip():
            continue
        try:
            value = json.loads(text.rstrip())
        except json.JSONDecodeError as error:
            line = number + error.lineno - 1
            wanted = "; the file must hold a list of objects, or an object in each line" * (kind(path) == ".json")
            raise ValueError(
                f"Line {line} of `path` {str(path)!r} is no JSON: {error.msg} at column {error.colno}{wanted}."
            ) from error
        for row in value if is_list else [value]:
            if not isinstance(row, dict):
                where = "An entry" if is_list else f"Line {number}"
                raise ValueError(f"{where} of `path` {str(path)!r} must be a JSON object, got {json.dumps(row):.80}.")
            yield row
