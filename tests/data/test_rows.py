"""Rows of all kinds of files, as they are written there."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tlt_lightning.data.rows import check_path, read_rows

TYPED = [
    {"prompt": "a", "answer": "2024-01-01", "numbers": [1, 2]},
    {"prompt": "b", "answer": 5, "numbers": [1.5]},
    {"prompt": "c", "answer": 2.5, "numbers": []},
    {"prompt": "d", "answer": "007", "numbers": None},
]


def read(path: Path, split: str = "train") -> list[dict[str, Any]]:
    check_path(str(path))
    return read_rows(str(path), None, split)


def write(path: Path, text: str) -> Path:
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


LINES = "\n".join(map(json.dumps, TYPED))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.jsonl", LINES),
        ("a.jsonl.gz", LINES),
        ("a.json", LINES),
        ("a.json", json.dumps(TYPED, indent=2)),
        ("a.jsonl", LINES.replace("\n", "\r\n\n") + "\n\n"),
        ("a.jsonl", "\ufeff" + LINES),
    ],
    ids=["lines", "gz", "lines as json", "list", "blank lines", "byte order mark"],
)
def test_json_keeps_its_types(name: str, text: str, tmp_path: Path) -> None:
    rows = read(write(tmp_path / name, text))
    assert rows == TYPED
    assert [type(row["answer"]) for row in rows] == [str, int, float, str]


def test_csv_holds_text(tmp_path: Path) -> None:
    text = 'prompt,answer\n"1, 2",007\n"two\nlines",\n'
    rows = [{"prompt": "1, 2", "answer": "007"}, {"prompt": "two\nlines", "answer": ""}]
    assert read(write(tmp_path / "a.csv", text)) == read(write(tmp_path / "a.csv.gz", text)) == rows


def test_a_whole_file_is_read_without_datasets(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", LINES)
    code = "import sys; from tlt_lightning.data.rows import read_rows; read_rows(sys.argv[1], None, 'train'); "
    code += "print({'datasets', 'pandas', 'pyarrow'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_what_datasets_saves_is_read(tmp_path: Path) -> None:
    from datasets import Dataset, DatasetDict

    rows = [{"prompt": str(i), "answer": i, "turns": [{"role": "user", "content": "a"}]} for i in range(4)]
    data = Dataset.from_list(rows)
    data.to_parquet(tmp_path / "a.parquet")
    data.save_to_disk(tmp_path / "one")
    DatasetDict(train=data, test=data.select([3])).save_to_disk(tmp_path / "several")
    assert read(tmp_path / "a.parquet") == read(tmp_path / "one") == read(tmp_path / "several") == rows
    assert read(tmp_path / "several", "test") == rows[3:]
    assert read(tmp_path / "several", "test+train[:1]") == [rows[3], rows[0]]
    assert read(tmp_path / "one", "train[-1:]") == rows[3:]


def test_a_column_that_some_rows_lack_is_none_there(tmp_path: Path) -> None:
    assert read(write(tmp_path / "a.jsonl", '{"a": 1}\n{"b": 2}')) == [{"a": 1, "b": None}, {"a": None, "b": 2}]


def test_slices_of_files_are_taken(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", LINES)
    assert read(path, "train[:1]+train[75%:]") == [TYPED[0], TYPED[3]]
    for split in ("test", "train[:x]"):
        with pytest.raises(ValueError, match=r"`split` '.*' of '.*a.jsonl' must be 'train', or a slice such as 'train"):
            read(path, split)


@pytest.mark.parametrize(
    ("name", "text", "match"),
    [
        ("a.jsonl", '{"a": 1}\n\n{"a": \n', "Line 3 of `path` '.*' is no JSON: Expecting value at column"),
        ("a.jsonl", '{"a": 1}\n[1]\n', r"Line 2 of `path` '.*' must be a JSON object, got \[1\]"),
        ("a.json", '[\n{"a": 1},\n{"a" 2}]', "Line 3 of `path` '.*' is no JSON: Expecting ':'"),
        ("a.json", '{\n"rows": [{"a": 1}]\n}', "is no JSON: .* a list of objects, or an object in each line"),
        ("a.json", '[{"a": 1}, "b"]', 'An entry of .* must be a JSON object, got "b"'),
        ("a.csv", "a,b,a\n1,2,3\n", "Line 1 of .* names the column 'a' more than once; rename or drop one"),
        ("a.csv", "a,b\n1,2\n3\n", "Line 3 of .* has not the 2 columns"),
        ("a.csv", "a,b\n1,2,3\n", "Line 2 of .* has not the 2 columns"),
    ],
)
def test_a_broken_line_is_named(name: str, text: str, match: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=match):
        read(write(tmp_path / name, text))


@pytest.mark.parametrize(
    "path", ["nope.csv", "nope.jsonl.gz", "my/nope.txt", "./nope", "../nope", "a/b/c", "/nope/train", "here/nope"]
)
def test_a_mistyped_path_is_an_error_and_no_hub_name(path: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    with pytest.raises(FileNotFoundError, match=r"does not exist .* \.jsonl, \.json, \.csv"):
        check_path(path)


@pytest.mark.parametrize("name", ["openai/gsm8k", "imdb", "owner/data-v1.0", "HuggingFaceH4/MATH-500"])
def test_hub_names_are_left_to_the_hub(name: str) -> None:
    check_path(name)


def test_what_datasets_cannot_read_is_named_with_its_reason(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    write(tmp_path / "full.jsonl", LINES)
    for path, split, reason in (
        ("nobody/nothing", "train", "'nobody/nothing' on the Hub"),  # tests have no network
        (str(tmp_path / "empty"), "train", "doesn't contain any data files"),
        (str(tmp_path), "test", 'Unknown split "test"'),
    ):
        with pytest.raises(ValueError, match=rf"`path` '{path}' \(`config` None, `split` '{split}'\) cannot.*{reason}"):
            read(Path(path), split)


def test_an_error_of_datasets_without_words_is_named_by_its_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise TimeoutError

    monkeypatch.setattr("datasets.load_dataset", fail)
    with pytest.raises(ValueError, match=r"cannot be read, says `datasets`: TimeoutError\. It must be"):
        read(Path("nobody/nothing"), "train")


def test_a_file_of_an_unknown_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no known suffix"):
        check_path(str(write(tmp_path / "a.txt", "")))


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.jsonl", '{"prompt": "é"}\n'.encode("latin-1"), "is not UTF-8"),
        ("a.csv", "prompt\né\n".encode("latin-1"), "is not UTF-8"),
        ("a.jsonl", LINES.encode("utf-16"), "is not UTF-8"),
        ("a.jsonl.gz", gzip.compress(LINES.encode())[:-12], "is damaged"),
        ("a.jsonl.gz", LINES.encode(), "is damaged"),
        ("a.parquet", b"PAR1 and no more", "is damaged"),
    ],
    ids=["latin-1", "latin-1 csv", "utf-16", "cut off", "not compressed", "parquet"],
)
def test_a_file_that_cannot_be_decoded_is_named(name: str, content: bytes, reason: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=rf"`path` '.*{name}' {reason}"):
        read(tmp_path / name)
