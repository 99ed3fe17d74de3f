"""Conversations as strangers have them become texts whose answers alone are learned."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerFast

from tests.conftest import save_policy, save_tokenizer
from tlt_lightning.data.formats import LeftOut, RowReader, Text
from tlt_lightning.drafter.packing import packs_of
from tlt_lightning.hidden_states import PolicyText

TEMPLATE = (
    "{% if messages[-1]['content'] == '18' %}{{ ') ' }}{% endif %}"
    "{% for turn in messages %}{% if turn['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('no such role') }}{% endif %}"
    "{{ {'system': '( ', 'user': ': ', 'assistant': '= '}[turn['role']] + turn['content'] + ' <eos>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '= ' }}{% endif %}"
)
FORGETFUL = (  # as Qwen3's, which leaves out what was thought before the last question
    "{% for turn in messages %}{% if turn['role'] == 'user' %}{{ ': ' + turn['content'] + ' <eos>\n' }}"
    "{% elif loop.last %}{{ '= ' + turn['content'] + ' <eos>\n' }}"
    "{% else %}{{ '= ' + turn['content'].split(' / ')[-1] + ' <eos>\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '= ' }}{% endif %}"
)
TWO_TURNS = [("user", "1 + 2"), ("assistant", "3"), ("user", "+ 4"), ("assistant", "7 * 1")]


def save_target(path: Path, template: str | None = TEMPLATE) -> str:
    path.mkdir(exist_ok=True)
    save_tokenizer(path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(path)
    return str(path)


@pytest.fixture
def reader(tmp_path: Path) -> RowReader:
    return RowReader(save_target(tmp_path), 256)


def messages(turns: list[tuple[str, str]] = TWO_TURNS) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in turns]


def words(reader: RowReader, ids: list[int]) -> str:
    return reader.tokenizer.decode(ids)


@pytest.mark.parametrize(
    "row",
    [
        {"messages": messages(), "prompt": "+"},  # as UltraChat has both
        {"messages": [{**turn, "tool_calls": None} for turn in messages()], "conversations": None},
        {
            "id": "x",
            "conversations": [
                {"from": {"user": "human", "assistant": "gpt"}[role], "value": content} for role, content in TWO_TURNS
            ],
        },
        {"conversations": messages()},
        {"prompt": messages()[:3], "completion": messages()[3:]},
    ],
    ids=["messages", "with empty columns", "conversations", "of role and content", "prompt and completion"],
)
def test_each_format_gives_the_conversation_with_its_answers(row: dict[str, Any], reader: RowReader) -> None:
    (text,) = reader.texts(row)
    assert words(reader, text.ids) == ": 1 + 2 <eos> = 3 <eos> : + 4 <eos> = 7 * 1 <eos>"
    assert words(reader, text.prompt) == ": 1 + 2 <eos> ="
    assert words(reader, text.answers) == "3 <eos> 7 * 1 <eos>"


def test_a_prompt_and_a_completion_of_text_are_a_turn_each_or_plain(reader: RowReader, tmp_path: Path) -> None:
    row = {"prompt": "1 + 2", "completion": "3"}
    (text,) = reader.texts(row)
    assert words(reader, text.ids) == ": 1 + 2 <eos> = 3 <eos>"
    plain = RowReader(save_target(tmp_path / "plain", None), 256)
    (text,) = plain.texts({"prompt": "1 + 2 ", "completion": "= 3"})
    assert (words(plain, text.prompt), words(plain, text.answers)) == ("1 + 2", "= 3 <eos>")
    with pytest.raises(ValueError, match=r"no chat template.*`prompt` and `completion`"):
        plain.texts({"messages": messages()})


def test_to_say_nothing_is_not_learned(reader: RowReader, tmp_path: Path) -> None:
    turns = [("user", "1"), ("assistant", ""), ("user", "2"), ("assistant", "3")]
    (text,) = reader.texts({"messages": messages(turns)})
    assert (words(reader, text.prompt), words(reader, text.answers)) == (": 1 <eos> = <eos> : 2 <eos> =", "3 <eos>")
    with pytest.raises(LeftOut, match="no `assistant` answers"):
        RowReader(save_target(tmp_path, None), 256).texts({"prompt": "1", "completion": ""})


def test_what_predict_wrote_stays_as_it_is(reader: RowReader) -> None:
    row = {"prompt_ids": [5, 6], "response_ids": [7, 31], "prompt": "+", "completion": "1"}
    assert reader.texts(row) == [Text([5, 6, 7, 31], 2)]
    assert reader.texts({**row, "observed": [[1, 1]]}) == [Text([5, 6, 7, 31], 2, ((3, 4),))]  # no answer of its own


def test_a_template_that_forgets_gives_each_answer_behind_what_its_engine_reads(tmp_path: Path) -> None:
    reader = RowReader(save_target(tmp_path, FORGETFUL), 256)
    turns = [("user", "1"), ("assistant", "2 / 3"), ("user", "4"), ("assistant", "5 / 6")]
    first, second = reader.texts({"messages": messages(turns)})
    assert words(reader, first.ids) == ": 1 <eos> = 2 / 3 <eos>"
    assert words(reader, second.ids) == ": 1 <eos> = 3 <eos> : 4 <eos> = 5 / 6 <eos>"
    assert words(reader, second.answers) == "5 / 6 <eos>"


def test_an_answer_ends_where_the_engine_ends_it(tmp_path: Path) -> None:
    """Phi-3's template writes another end behind all, unless an answer is asked for."""
    reader = RowReader(
        save_target(tmp_path, TEMPLATE + "{% if not add_generation_prompt %}{{ '<eos>' }}{% endif %}"), 256
    )
    (text,) = reader.texts({"messages": messages()})
    assert words(reader, text.ids) == ": 1 + 2 <eos> = 3 <eos> : + 4 <eos> = 7 * 1 <eos>"
    assert words(reader, text.answers) == "3 <eos> 7 * 1 <eos>"


def test_an_answer_ends_also_where_the_template_ends_it_otherwise(tmp_path: Path) -> None:
    """As Qwen2.5's base models, whose engine ends at another token than their template writes."""
    reader = RowReader(save_target(tmp_path, TEMPLATE.replace("<eos>", "+")), 256)
    first, second = reader.texts({"messages": messages()})
    assert words(reader, first.ids) == ": 1 + 2 + = 3 + <eos>"
    assert words(reader, second.ids) == ": 1 + 2 + = 3 + : + 4 + = 7 * 1 + <eos>"
    assert words(reader, second.answers) == "7 * 1 + <eos>"


@pytest.mark.parametrize("opened", ["= / ", "= 0 / "])
def test_an_answer_begins_where_it_leaves_what_the_engine_would_have_begun(opened: str, tmp_path: Path) -> None:
    """As templates of thinking models open the thought that they leave out of what was said."""
    reader = RowReader(save_target(tmp_path, TEMPLATE.replace("{{ '= ' }}", f"{{{{ '{opened}' }}}}")), 256)
    (text,) = reader.texts({"messages": messages()})
    assert words(reader, text.ids) == ": 1 + 2 <eos> = 3 <eos> : + 4 <eos> = 7 * 1 <eos>"
    assert words(reader, text.answers) == "3 <eos> 7 * 1 <eos>"


@pytest.mark.parametrize("thought", ["/ 2 / ", " /  2 / ", "2 / "])
def test_what_a_template_drops_of_every_answer_is_learned_as_the_engine_wrote_it(thought: str, tmp_path: Path) -> None:
    """As DeepSeek-R1's, which opens the thought and drops it from what was said; data hold the opening or do not."""
    drops = TEMPLATE.replace("turn['content'] +", "turn['content'].split(' / ')[-1] +")
    reader = RowReader(save_target(tmp_path, drops.replace("{{ '= ' }}", "{{ '= / ' }}")), 256)
    turns = [("user", "1"), ("assistant", f"{thought}3"), ("user", "4"), ("assistant", f"{thought}6 ")]
    first, second = reader.texts({"messages": messages(turns)})
    assert (words(reader, first.prompt), words(reader, first.answers)) == (": 1 <eos> = /", "2 / 3 <eos>")
    assert words(reader, second.prompt) == ": 1 <eos> = 3 <eos> : 4 <eos> = /"
    assert words(reader, second.answers) == "2 / 6 <eos>"


def test_a_text_has_the_same_tokens_on_every_day(tmp_path: Path) -> None:
    """A stream knows lengths beforehand, and a resumed run holds out the same prompts, though a template has a date."""
    dated = "{% if strftime_now('%d %b %Y') == '26 Jul 2024' %}{{ '7 ' }}{% else %}{{ '8 8 ' }}{% endif %}"
    (text,) = RowReader(save_target(tmp_path, dated + TEMPLATE), 256).texts({"messages": messages()})
    assert text.ids[:1] == AutoTokenizer.from_pretrained(tmp_path)("7")["input_ids"]


def test_a_tokenizer_that_does_not_tell_places_is_refused_for_text_alone(tmp_path: Path) -> None:
    tokenizer = ByT5Tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path)
    reader = RowReader(str(tmp_path), 256)
    assert reader.texts({"prompt_ids": [5], "response_ids": [7]}) == [Text([5, 7], 1)]
    with pytest.raises(ValueError, match=r"tokenizer of `target` .* tell where tokens begin; give `prompt_ids`"):
        reader.texts({"messages": messages()})


def test_texts_end_where_the_target_reads_no_further(tmp_path: Path) -> None:
    row = {"messages": messages()}
    save_target(tmp_path)
    (whole,), (cut,) = RowReader(str(tmp_path), 256).texts(row), RowReader(str(tmp_path), 11).texts(row)
    assert cut == Text(whole.ids[:11], 6, ((8, 11),))
    with pytest.raises(LeftOut, match="6 tokens before an answer, which has to end within 6"):
        RowReader(str(tmp_path), 6).texts(row)


@pytest.mark.parametrize(
    ("turns", "reason"),
    [
        (messages([("user", "1")]), "no `assistant` answers"),
        (messages([("assistant", "1")]), "no `assistant` answers"),
        (messages([("user", "1"), ("assistant", " ")]), "no `assistant` answers"),  # of an empty cell of a table
        ([], "no `assistant` answers"),
        ("1 + 2", "'1 \\+ 2' in the place of a turn"),
        (1, "1 in the place of a turn"),
        ([{"role": "user"}, *messages()], "'role': 'user'"),
        (messages([("user", "1"), ("user", "18"), ("assistant", "3")]), "otherwise than with the answer"),
        (messages([("user", "1 \ud83d"), ("assistant", "3")]), "half a surrogate pair"),
        (messages([("user", "1"), ("tool", "2"), ("assistant", "3")]), "cannot write .*no such role"),
    ],
)
def test_conversations_that_teach_nothing_say_why(turns: Any, reason: str, reader: RowReader) -> None:
    with pytest.raises(LeftOut, match=reason):
        reader.texts({"messages": turns})


@pytest.mark.parametrize("row", [{"question": "1", "prompt": "2"}, {"messages": None}, {}, [1, 2], "1"])
def test_rows_of_no_format_are_refused_with_those_there_are(row: Any, reader: RowReader) -> None:
    with pytest.raises(ValueError, match=r"`prompt_ids` and `response_ids`.*`messages`.*`from`.*`completion`"):
        reader.texts(row)


def test_entries_within_an_answer_are_learned_and_no_others(reader: RowReader) -> None:
    (text,) = reader.texts({"messages": messages([*TWO_TURNS, ("user", "5"), ("assistant", "6")])})
    assert words(reader, text.answers) == "3 <eos> 7 * 1 <eos> 6 <eos>"
    states = torch.zeros(len(text.ids), 3)
    (batch,) = packs_of([PolicyText(torch.tensor(text.ids), states, states, text.prompt_length, 0, text.others)], 128)
    pairs = zip(batch.input_ids[0, batch.loss_mask[0]].tolist(), batch.next_ids[0, batch.loss_mask[0]], strict=True)
    assert [words(reader, list(pair)) for pair in pairs] == ["3 <eos>", "7 *", "* 1", "1 <eos>", "6 <eos>"]


def test_a_saved_policy_has_what_the_reader_wants(tmp_path: Path) -> None:
    """Its tokenizer is loaded once there is text, not for tokens."""
    policy = str(save_policy(tmp_path))
    (tmp_path / "tokenizer.json").unlink()
    assert RowReader(policy, 256).texts({"prompt_ids": [5], "response_ids": [7]}) == [Text([5, 7], 1)]


@pytest.mark.parametrize("template", [None, "{{ messages[0]['content'] }}{{ messages[1]['content'] if messages[1:] }}"])
def test_a_token_never_holds_the_end_of_a_prompt_and_the_beginning_of_an_answer(
    template: str | None, tmp_path: Path
) -> None:
    """The engine reads the prompt alone, so what is learned must stand behind the tokens that it has by itself."""
    words = {letter: number for number, letter in enumerate(["a", "<eos>", "b", "c", "ab", "bc"])}
    model = models.BPE(words, merges=[("a", "b"), ("b", "c")])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model), eos_token="<eos>")
    tokenizer.chat_template = template
    save_policy(tmp_path)  # its `config.json` alone is read
    tokenizer.save_pretrained(tmp_path)
    assert tokenizer("cabc")["input_ids"] == [words[each] for each in ("c", "ab", "c")]
    (text,) = RowReader(str(tmp_path), 16).texts({"prompt": "ca", "completion": "bc"})
    assert text == Text([*tokenizer("ca")["input_ids"], words["bc"], words["<eos>"]], 2)
