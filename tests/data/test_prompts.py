import gc
import json
import logging
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from jsonargparse import ArgumentParser

from tlt_lightning.data.prompts import PromptCursor, PromptSource, load_prompts
from tlt_lightning.policy import load_tokenizer
from tlt_lightning.rewards import countdown, exact_match, math_equivalence
from tlt_lightning.rollout import Prompt

CHAT_TEMPLATE = "{% for m in messages %}{{ m.role }} = {{ m.content }} {% endfor %}:"


def write(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_jsonl_rows_become_prompts(prompts_path: str, policy_path: str) -> None:
    prompts = load_prompts(PromptSource(path=prompts_path), load_tokenizer(policy_path), max_prompt_tokens=16)
    assert [prompt.text for prompt in prompts][:2] == ["0 1 = 1 :", "1 2 = 3 :"]
    assert prompts[0].ids == (12, 13, 3, 13, 4)
    assert prompts[0].answer == prompts[0].row["answer"] == "0 + 1"
    assert [prompt.index for prompt in prompts] == list(range(9))


def test_an_end_token_that_the_tokenizer_appends_is_no_part_of_a_prompt(policy_path: str) -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = load_tokenizer(policy_path)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="$A <eos>", special_tokens=[("<eos>", 1)])
    assert tokenizer("0 1 :")["input_ids"][-1] == 1
    plain, ended = load_prompts(
        PromptSource(rows=[{"prompt": "0 1 :"}, {"prompt": "0 <eos>"}], answer_column=None),
        tokenizer,
        max_prompt_tokens=16,
    )
    assert plain.ids == (12, 13, 4)
    assert ended.ids == (12, 1)  # what the text itself says stays


def test_parquet_reads_the_same_rows(prompts_path: str, policy_path: str, tmp_path: Path) -> None:
    from datasets import Dataset

    path = tmp_path / "prompts.parquet"
    Dataset.from_json(prompts_path).to_parquet(path)
    tokenizer = load_tokenizer(policy_path)
    from_parquet = load_prompts(PromptSource(path=str(path)), tokenizer, max_prompt_tokens=16)
    from_jsonl = load_prompts(PromptSource(path=prompts_path), tokenizer, max_prompt_tokens=16)
    assert from_parquet == from_jsonl


def test_prompts_hold_the_number_of_each_token_once_in_memory(prompts_path: str) -> None:
    class Tokenizer:
        chat_template = eos_token_id = None

        def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
            return {"input_ids": [1000 + int(word) for word in text.split() if word.isdigit()]}  # new numbers

    prompts = load_prompts(PromptSource(path=prompts_path), Tokenizer(), max_prompt_tokens=16)
    gc.collect()
    assert not any(gc.is_tracked(prompt.ids) for prompt in prompts)
    tokens = [token for prompt in prompts for token in prompt.ids]
    assert len({id(token) for token in tokens}) == len({*tokens}) < len(tokens)


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


def test_a_chat_template_of_ones_own_replaces_the_tokenizers(
    policy_path: str, prompts_path: str, tmp_path: Path
) -> None:
    tokenizer = load_tokenizer(policy_path)
    (tmp_path / "own.jinja").write_text(CHAT_TEMPLATE)
    for template in (CHAT_TEMPLATE, str(tmp_path / "own.jinja")):
        source = PromptSource(path=prompts_path, chat_template=template)
        assert load_prompts(source, tokenizer, max_prompt_tokens=64)[0].text == "user = 0 1 = 1 : :"
        tokenizer.chat_template = "other"
    with pytest.raises(FileNotFoundError, match=r"missing\.jinja"):
        PromptSource(path=prompts_path, chat_template="missing.jinja")


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"chat": True}, "`chat: true`, but the policy's tokenizer has no chat template"),
        ({"system_prompt": "be brief"}, "`system_prompt`, .* are for chat"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "`chat_template_kwargs` are for chat"),
        ({"chat": False, "chat_template": CHAT_TEMPLATE}, "`chat_template` and `chat_template_kwargs` are for chat"),
    ],
)
def test_chat_options_without_a_chat_template_are_an_error(
    arguments: dict, match: str, policy_path: str, prompts_path: str
) -> None:
    with pytest.raises(ValueError, match=match):
        load_prompts(PromptSource(path=prompts_path, **arguments), load_tokenizer(policy_path), max_prompt_tokens=16)


def test_long_prompts_are_dropped_and_reported(
    policy_path: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path / "a.jsonl", [{"prompt": "1 2 3 4 5 6", "answer": 0}, {"prompt": "1 2 3 4", "answer": 0}])
    tokenizer = load_tokenizer(policy_path)
    with caplog.at_level(logging.WARNING):
        prompts = load_prompts(PromptSource(path=path), tokenizer, max_prompt_tokens=4)
    assert [prompt.index for prompt in prompts] == [1]
    assert "1 of 2 prompts" in caplog.text
    assert "longest has 6" in caplog.text


@pytest.mark.parametrize(("column", "name"), [("prompt_column", "question"), ("answer_column", "solution")])
def test_missing_column_names_those_there_are(column: str, name: str, prompts_path: str) -> None:
    with pytest.raises(ValueError, match=f"no column '{name}'; it has prompt, answer"):
        PromptSource(path=prompts_path, **{column: name}).read()


def test_a_source_without_rows_is_an_error_that_names_the_split(prompts_path: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"`split` 'train' of `path` '.*empty\.jsonl' holds no rows"):
        PromptSource(path=write(tmp_path / "empty.jsonl", [])).read()
    with pytest.raises(ValueError, match=r"`split` 'train\[9:\]' of `path` .* holds no rows; choose one that does"):
        PromptSource(path=prompts_path, split="train[9:]").read()
    with pytest.raises(ValueError, match=r"`split` 'train\[9:\]' of `rows` holds no rows"):
        PromptSource(rows=[{"prompt": "1 + 1"}], split="train[9:]").read()


def test_without_an_answer_column_a_row_is_what_the_data_holds(policy_path: str) -> None:
    row = {"prompt": "0 1 =", "answer": "42", "final": "7"}
    tokenizer = load_tokenizer(policy_path)
    (prompt,) = load_prompts(PromptSource(rows=[row], answer_column=None), tokenizer, max_prompt_tokens=8)
    assert prompt.row == row
    assert prompt.answer is None
    (prompt,) = load_prompts(PromptSource(rows=[row], answer_column="final"), tokenizer, max_prompt_tokens=8)
    assert (prompt.answer, prompt.row["answer"]) == ("7", "7")


@pytest.mark.parametrize("form", [None, "numpy", "torch"])
def test_rewards_see_pythons_numbers_whatever_the_format_of_the_data(form: str | None, policy_path: str) -> None:
    from datasets import Dataset

    row = {"prompt": "0 1 =", "answer": 7, "numbers": [3, 4], "meta": {"level": 2}}
    source = PromptSource(rows=Dataset.from_list([row]).with_format(form))
    (prompt,) = load_prompts(source, load_tokenizer(policy_path), max_prompt_tokens=8)
    assert repr(prompt.row) == repr(row)
    assert exact_match("", "7", prompt.row) == math_equivalence("", r"\boxed{7}", prompt.row) == 1.0
    assert countdown("", "<answer> 3 + 4", prompt.row) == 1.0


def test_numbers_of_pandas_and_tensors_in_a_list_of_rows_become_pythons() -> None:
    row = {"prompt": "1", "answer": np.int64(7), "more": [np.float32(0.5), torch.tensor([1, 2])]}
    assert repr(PromptSource(rows=[row]).read()) == repr([{"prompt": "1", "answer": 7, "more": [0.5, [1, 2]]}])


CONVERSATION = [{"role": "system", "content": "1"}, {"role": "user", "content": "0 1 ="}]


def chat_tokenizer(policy_path: str) -> Any:
    tokenizer = load_tokenizer(policy_path)
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def load_rows(rows: list[dict], tokenizer: Any, **settings: Any) -> list[Prompt]:
    return load_prompts(PromptSource(rows=rows, answer_column=None, **settings), tokenizer, max_prompt_tokens=64)


def test_a_conversation_is_written_by_the_chat_template(policy_path: str, tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(policy_path)
    path = write(tmp_path / "a.jsonl", [{"prompt": CONVERSATION, "answer": 1}])
    (prompt,) = load_prompts(PromptSource(path=path), tokenizer, max_prompt_tokens=64)
    assert prompt.text == "system = 1 user = 0 1 = :"
    assert prompt.question == "0 1 ="
    assert prompt.row["prompt"] == CONVERSATION
    (prompt,) = load_rows([{"prompt": CONVERSATION[1:]}], tokenizer, system_prompt="2")
    assert prompt.text == "system = 2 user = 0 1 = :"


def test_variables_reach_the_chat_template(policy_path: str) -> None:
    tokenizer = load_tokenizer(policy_path)
    tokenizer.chat_template = "{{ messages[0].content }} {% if enable_thinking %}1{% else %}2{% endif %}"
    (prompt,) = load_rows([{"prompt": "0"}], tokenizer, chat_template_kwargs={"enable_thinking": False})
    assert prompt.text == "0 2"


@pytest.mark.parametrize(
    ("prompt", "match"),
    [
        (None, "must hold text or a list of messages, .* got None; fill it in, or leave the row out of the data"),
        ("", "must hold text"),
        (" \n", "must hold text"),
        (5, "must hold text"),
        (["1"], "must hold text"),
        ([*CONVERSATION, "1"], "must hold text"),
        ([], "must hold text"),
        ([{"role": "user"}], "must hold text"),
        ([{"role": "user", "content": [{"type": "image"}]}], "must hold text"),
        ([*CONVERSATION, {"role": "assistant", "content": "1"}], "ends with what the assistant says, '1'"),
        ("half a \ud83d", ".*surrogates not allowed"),
    ],
)
def test_what_is_no_prompt_is_refused_with_its_row(prompt: Any, match: str, policy_path: str) -> None:
    rows = [{"prompt": "1"}, {"prompt": prompt}]
    with pytest.raises(ValueError, match=f"Row 1 of `rows`: `prompt_column` 'prompt' {match}"):
        load_rows(rows, chat_tokenizer(policy_path))


def test_a_conversation_that_cannot_be_written_is_refused(policy_path: str) -> None:
    user, system = ({"role": role, "content": "1"} for role in ("user", "system"))
    for conversation in (CONVERSATION, [user, user], [system]):
        with pytest.raises(ValueError, match=r"Row 0 .* needs a tokenizer with a chat template"):
            load_rows([{"prompt": conversation}], load_tokenizer(policy_path))
    tokenizer = load_tokenizer(policy_path)
    tokenizer.chat_template = "{{ messages[0].nothing }}"
    with pytest.raises(ValueError, match=r"Row 0 of `rows` \(from 0\) gives an empty prompt; leave"):
        load_rows([{"prompt": "1"}], tokenizer)
    with pytest.raises(ValueError, match=r"Row 0 .* system message of its own"):
        load_rows([{"prompt": CONVERSATION}], chat_tokenizer(policy_path), system_prompt="2")


def test_sources_are_made_of_what_python_users_have(prompts_path: str) -> None:
    from datasets import Dataset

    rows = [json.loads(line) for line in Path(prompts_path).read_text().splitlines()]
    for data in (prompts_path, Path(prompts_path), rows, Dataset.from_list(rows), PromptSource(path=prompts_path)):
        assert PromptSource.of(data).read() == rows
    with pytest.raises(FileNotFoundError, match=r"`path` 'no/where\.csv' does not exist"):
        PromptSource(path=Path("no/where.csv"))  # type: ignore[arg-type]
    assert PromptSource(rows=rows, split="train[2:4]").read() == rows[2:4]


class Counting(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Has a row for every number, as data sets of PyTorch may: their length alone says where they end."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> dict[str, Any]:
        assert index < 10, "read on behind its end"
        return {"prompt": f"{index} + 1", "answer": index + 1}


def test_a_data_set_of_pytorch_ends_at_its_length() -> None:
    assert [row["answer"] for row in PromptSource(rows=Counting()).read()] == [1, 2, 3]


def test_rows_in_yaml_keep_their_types() -> None:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--train", type=PromptSource)
    row = {"prompt": "1", "answer": "2024-01-01", "numbers": [{"a": "2", "b": 2}]}
    config = parser.parse_object({"train": {"rows": [row]}})
    config = parser.parse_string(parser.dump(config))
    assert parser.instantiate_classes(config).train.read() == [row]


def test_what_is_no_source_is_refused(prompts_path: str) -> None:
    from datasets import Dataset, DatasetDict

    splits = DatasetDict(train=Dataset.from_list([{"a": 1}]), test=Dataset.from_list([{"a": 1}]))
    for data in (splits, splits["train"].to_iterable_dataset(), 5, iter([{}])):
        with pytest.raises(TypeError, match=rf"one split of a `datasets.Dataset`, got {type(data).__name__}\."):
            PromptSource.of(data)
    with pytest.raises(TypeError, match=r"got list, whose row 1 is '1 \+ 1'\."):
        PromptSource.of([{"prompt": "1"}, "1 + 1"])
    with pytest.raises(ValueError, match="neither `path` nor `rows`: give one, or null for the whole source, as in"):
        PromptSource()
    with pytest.raises(ValueError, match=rf"has `path` '{prompts_path}' and `rows`, too: set one of them to null"):
        PromptSource(path=prompts_path, rows=[])


def test_cursor_uses_every_prompt_once_a_pass_in_changing_order() -> None:
    cursor = PromptCursor(5, seed=1)
    first, second = cursor.peek(10)[:5], cursor.peek(10)[5:]
    assert sorted(first) == sorted(second) == list(range(5))
    assert first != second != PromptCursor(5, seed=2).peek(5)


def test_cursor_goes_on_where_it_was() -> None:
    cursor = PromptCursor(7, seed=0)
    cursor.position = 4
    assert cursor.peek(9) == PromptCursor(7, seed=0).peek(13)[4:]


def test_a_variable_that_a_command_line_left_as_text_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`chat_template_kwargs\.enable_thinking` is the text 'false'.*'\{enable_"):
        PromptSource(rows=[{"prompt": "0"}], chat_template_kwargs={"enable_thinking": "false"})


CALLS = "{% for m in messages %}{{ m.tool_calls|length if m.tool_calls is defined }}{{ m.name }} {% endfor %}"
ASKED = [
    {"role": "user", "content": "make 7", "name": "5"},
    {"role": "assistant", "content": "from", "tool_calls": [{"name": "f", "arguments": {"a": 1}}]},
    {"role": "user", "content": "3 4"},
]


def test_keys_that_arrow_gives_to_messages_without_them_reach_no_template(policy_path: str) -> None:
    from datasets import Dataset

    rows, tokenizer = [{"prompt": ASKED}], load_tokenizer(policy_path)
    tokenizer.chat_template = CALLS
    kept, filled = (load_rows(each, tokenizer)[0] for each in (rows, Dataset.from_list(rows)))
    assert filled.row["prompt"][2] == {**ASKED[2], "name": None, "tool_calls": None}
    assert filled.text == kept.text == "5 1  "


def test_whatever_a_template_raises_names_row_and_column(policy_path: str) -> None:
    tokenizer = load_tokenizer(policy_path)
    tokenizer.chat_template = "{{ messages[0].tags|length }}"
    rows = [{"prompt": [{**CONVERSATION[1], "tags": tags}]} for tags in ("1", 5)]
    with pytest.raises(ValueError, match="Row 1 of `rows`: `prompt_column` 'prompt' object of type 'int' has no len"):
        load_rows(rows, tokenizer)


DATED = "{{ strftime_now('%d %H:%M') }} {{ [1, 2, 3, 4, 5, 6, 7, 8]|random }} {{ messages[0].content }}"


def test_what_a_template_computes_anew_hangs_on_the_seed_alone(policy_path: str) -> None:
    def texts(seed: int) -> list[str]:
        source = PromptSource(rows=[{"prompt": "0"}] * 9, answer_column=None, chat_template=DATED)
        tokenizer = load_tokenizer(policy_path)
        return [prompt.text for prompt in load_prompts(source, tokenizer, max_prompt_tokens=16, seed=seed)]

    random.seed(3)
    before = random.getstate()
    assert texts(0) == texts(0) != texts(1)
    assert random.getstate() == before
    assert {text[:8] for text in texts(0)} == {"26 00:00"}  # as in texts that are imitated, on every day
