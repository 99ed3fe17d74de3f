"""Texts are read from files and datasets of every kind, with a key for each one's prompt."""

import json
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, DatasetDict

from tests.data.test_formats import FORGETFUL, messages, save_target
from tlt_lightning.data.formats import RowReader, Text
from tlt_lightning.drafter.texts.texts import texts_in


def texts_of(*paths: Path, **options: Any) -> tuple[list[Text], list[int]]:
    return texts_in([str(path) for path in paths], RowReader(str(paths[0].parent), 256), 32, **options)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "1 + 1", "response": "2"}, "Row 1 .*`prompt_ids` and `response_ids`"),
        ({"prompt_ids": [5], "response_ids": [3, 32]}, "completions.jsonl' holds tokens .*vocabulary of 32"),
        ({"prompt_ids": [5], "response_ids": [-3, 31]}, "vocabulary of 32"),
        ({"prompt_ids": [5], "response_ids": [3.5, 31]}, "Row 1 .*whole numbers"),
        ({"prompt_ids": "5", "response_ids": "3"}, "Row 1 .*whole numbers"),
    ],
)
def test_rows_that_cannot_be_trained_on_are_named(row: Any, message: str, tmp_path: Path) -> None:
    good = {"prompt_ids": [5], "response_ids": [3, 31]}
    path = tmp_path / "completions.jsonl"
    path.write_text(json.dumps(good) + "\n" + json.dumps(row) + "\n")
    with pytest.raises(ValueError, match=message):
        texts_of(path)


def test_texts_of_several_files_hold_any_characters(tmp_path: Path) -> None:
    written = [([n], [n, *range(n)]) for n in range(1, 9)]
    paths = [tmp_path / "completions.rank0.jsonl", tmp_path / "completions.rank1.jsonl"]
    for rank, path in enumerate(paths):
        rows = [
            json.dumps({"text": "\u4e00\u2028\x85", "prompt_ids": prompt, "response_ids": response}, ensure_ascii=False)
            for prompt, response in written[rank::2]
        ]
        path.write_text("\n\n".join(rows))  # as `predict` writes them; blank lines hold nothing
    texts, keys = texts_of(*paths)
    assert texts == [Text(prompt + response, 1) for prompt, response in written[::2] + written[1::2]]
    assert len(set(keys)) == 8


def test_conversations_are_read_from_every_kind_of_place(tmp_path: Path) -> None:
    rows = [{"messages": messages([("user", str(n)), ("assistant", "1 + 2")])} for n in range(6)]
    target = RowReader(save_target(tmp_path / "target"), 256)
    data, folder = Dataset.from_list(rows), tmp_path / "folder"
    folder.mkdir()
    (tmp_path / "lines.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "list.json").write_text(json.dumps(rows))
    data.to_parquet(tmp_path / "table.parquet")
    data.save_to_disk(tmp_path / "saved")
    DatasetDict({"train": data, "test": data.select([0])}).save_to_disk(tmp_path / "splits")
    (folder / "README.md").write_text(
        "---\nconfigs:\n- config_name: chat\n  data_files: [{split: train_sft, path: chat.jsonl}]\n---\n"
    )
    (folder / "chat.jsonl").write_text("\n".join(map(json.dumps, rows)))
    expected = [target.texts(row)[0] for row in rows]
    for name in ("lines.jsonl", "list.json", "table.parquet", "saved", "splits"):
        path = str(tmp_path / name)
        assert texts_in([path], target, 32)[0] == expected, name
        cut = texts_in([path], target, 32, split="train[1:3]+train[5:]")[0]
        assert cut == [*expected[1:3], expected[5]], name
    assert texts_in([str(folder)], target, 32, config="chat", split="train_sft")[0] == expected
    (tmp_path / "nothing.json").write_text("")
    with pytest.raises(ValueError, match=r"nothing.json' holds no text to learn from: it has no rows"):
        texts_in([str(tmp_path / "nothing.json")], target, 32)
    Dataset.from_list([{"a": 1, "ok": 2}]).to_parquet(tmp_path / "table.parquet")
    with pytest.raises(ValueError, match=r"Row 0 .* `completions` .*table.parquet' has a, ok; a row must have"):
        texts_in([str(tmp_path / "table.parquet")], target, 32)


def test_rows_that_teach_nothing_are_left_out_with_a_reason(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_target(tmp_path)
    path, silent = tmp_path / "some.jsonl", {"messages": messages([("user", "1")])}
    path.write_text(json.dumps({"messages": messages()}))
    assert len(texts_of(path)[0]) == 1
    assert not caplog.messages
    path.write_text("\n".join(map(json.dumps, [{"messages": messages()}, silent, silent])))
    assert len(texts_of(path)[0]) == 1
    assert caplog.messages == [
        f"2 of 3 rows of `completions` {str(path)!r} are left out, the first: row 1 (from 0), in which no `assistant` "
        "answers anything."
    ]
    path.write_text(json.dumps(silent))
    with pytest.raises(ValueError, match=r"holds no text to learn from: row 0 \(from 0\), in which no `assistant`"):
        texts_of(path)


def test_parts_of_a_conversation_have_one_key(tmp_path: Path) -> None:
    save_target(tmp_path, FORGETFUL)
    path = tmp_path / "some.jsonl"
    turns = [("user", "1"), ("assistant", "2 / 3"), ("user", "4"), ("assistant", "5 / 6")]
    path.write_text(json.dumps({"messages": messages(turns)}))
    texts, keys = texts_of(path)
    assert len(texts) == 2
    assert len(set(keys)) == 1
