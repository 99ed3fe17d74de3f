import json
import logging
from pathlib import Path

import pytest

from tlt_lightning.data.prompts import PromptCursor, PromptSource, load_prompts
from tlt_lightning.policy import load_tokenizer

CHAT_TEMPLATE = "{% for m in messages %}{{ m.role }} = {{ m.content }} {% endfor %}:"


def write(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_jsonl_rows_become_prompts(prompts_path: str, policy_path: str) -> None:
    prompts = load_prompts(PromptSource(path=prompts_path), load_tokenizer(policy_path), max_prompt_tokens=16)
    assert [prompt.text for prompt in prompts][:2] == ["0 1 = 1 :", "1 2 = 3 :"]
    assert prompts[0].ids == [12, 13, 3, 13, 4]
    assert prompts[0].answer == prompts[0].row["answer"] == "0 + 1"
    assert [prompt.index for prompt in prompts] == list(range(9))


def test_parquet_reads_the_same_rows(prompts_path: str, policy_path: str, tmp_path: Path) -> None:
    from datasets import Dataset

    path = tmp_path / "prompts.parquet"
    Dataset.from_json(prompts_path).to_parquet(path)
    tokenizer = load_tokenizer(policy_path)
    from_parquet = load_prompts(PromptSource(path=str(path)), tokenizer, max_prompt_tokens=16)
    from_jsonl = load_prompts(PromptSource(path=prompts_path), tokenizer, max_prompt_tokens=16)
    assert from_parquet == from_jsonl


def test_template_writes_the_question_from_several_columns(policy_path: str, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"a": 1, "choices": {"label": ["5", "6"]}, "key": "5"}])
    template = "{{ a }} {% for label in choices.label %}{{ label }} {% endfor %}:"
    source = PromptSource(path=path, template=template, answer_column="key")
    (prompt,) = load_prompts(source, load_tokenizer(policy_path), max_prompt_tokens=16)
    assert prompt.text == "1 5 6 :"
    assert prompt.answer == prompt.row["answer"] == "5"


def test_template_with_a_missing_column_is_an_error(policy_path: str, prompts_path: str) -> None:
    source = PromptSource(path=prompts_path, template="{{ nothing }}")
    with pytest.raises(Exception, match="nothing"):
        load_prompts(source, load_tokenizer(policy_path), max_prompt_tokens=16)


def test_chat_template_is_applied_if_there_is_one(policy_path: str, prompts_path: str) -> None:
    tokenizer = load_tokenizer(policy_path)
    tokenizer.chat_template = CHAT_TEMPLATE
    source = PromptSource(path=prompts_path, system_prompt="1")
    assert load_prompts(source, tokenizer, max_prompt_tokens=64)[0].text == "system = 1 user = 0 1 = 1 : :"
    source = PromptSource(path=prompts_path, chat=False)
    assert load_prompts(source, tokenizer, max_prompt_tokens=64)[0].text == "0 1 = 1 :"


@pytest.mark.parametrize("arguments", [{"chat": True}, {"system_prompt": "be brief"}])
def test_chat_options_without_a_chat_template_are_an_error(
    arguments: dict, policy_path: str, prompts_path: str
) -> None:
    with pytest.raises(ValueError, match="chat"):
        load_prompts(PromptSource(path=prompts_path, **arguments), load_tokenizer(policy_path), max_prompt_tokens=16)


def test_long_prompts_are_dropped_and_reported(
    policy_path: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path / "a.jsonl", [{"prompt": "1 2 3 4 5 6", "answer": 0}, {"prompt": "1", "answer": 0}])
    tokenizer = load_tokenizer(policy_path)
    with caplog.at_level(logging.WARNING):
        prompts = load_prompts(PromptSource(path=path), tokenizer, max_prompt_tokens=4)
    assert [prompt.index for prompt in prompts] == [1]
    assert "1 of 2 prompts" in caplog.text
    assert "longest has 6" in caplog.text
    with pytest.raises(ValueError, match="1 of 2 prompts"):
        load_prompts(PromptSource(path=path), tokenizer, max_prompt_tokens=4, too_long="error")


def test_missing_file_is_an_error_at_once() -> None:
    with pytest.raises(FileNotFoundError, match=r"nowhere\.jsonl"):
        PromptSource(path="nowhere.jsonl")


@pytest.mark.parametrize(("column", "name"), [("prompt_column", "question"), ("answer_column", "solution")])
def test_missing_column_names_those_there_are(column: str, name: str, prompts_path: str) -> None:
    with pytest.raises(ValueError, match=f"no column '{name}'; it has prompt, answer"):
        PromptSource(path=prompts_path, **{column: name}).rows()


def test_empty_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no rows"):
        PromptSource(path=write(tmp_path / "empty.jsonl", [])).rows()


def test_cursor_uses_every_prompt_once_a_pass_in_changing_order() -> None:
    cursor = PromptCursor(5, seed=1)
    first, second = cursor.take(5), cursor.take(5)
    assert sorted(first) == sorted(second) == list(range(5))
    assert first != second


def test_ranks_share_what_one_rank_would_take() -> None:
    whole = PromptCursor(7, seed=0)
    ranks = [PromptCursor(7, seed=0) for _ in range(2)]
    for _ in range(4):
        shares = [cursor.take(6, rank=rank, world_size=2) for rank, cursor in enumerate(ranks)]
        taken = whole.take(6)
        assert shares == [taken[0::2], taken[1::2]]


def test_cursor_goes_on_where_it_was() -> None:
    cursor = PromptCursor(7, seed=0)
    cursor.take(4)
    resumed = PromptCursor(7, seed=0)
    resumed.position = cursor.position
    assert resumed.take(9) == cursor.take(9)
