"""Conversations as tokens: what was sampled stays, and between turns stands what the template puts there."""

import random
import re
from typing import Any

import pytest
from trl.chat_template_utils import get_training_chat_template

from tests.support.chat_tokenizers import ENDS, byte_tokenizer, template_of
from tlt_lightning.data import prompts
from tlt_lightning.data.prompts import PromptSource
from tlt_lightning.environments.environments import Environments
from tlt_lightning.environments.turns import Turns
from tlt_lightning.policy import load_tokenizer

GUESS: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "guess",
        "description": "Guess it.",
        "parameters": {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]},
    },
}
SAID = {"user": {"role": "user", "content": "higher"}, "tool": {"role": "tool", "name": "guess", "content": "higher"}}
FORGETFUL = {"qwen3": ["user"], "deepseek_r1_distill": ["user", "tool"]}  # whom they forget the policy's thoughts for
CASES = [(name, role) for name in ENDS for role in ("user", "tool") if role not in FORGETFUL.get(name, ())]


class Talking:
    """A game in words."""

    def reset(self, **row: Any) -> None: ...

    def step(self, text: str) -> str | None: ...


class Guessing:
    """A game with a tool."""

    def reset(self, **row: Any) -> None: ...

    def guess(self, number: int) -> None:
        """Guess it.

        Args:
            number: The guess.
        """


def turns_of(name: str, role: str = "user") -> Turns:
    tokenizer = byte_tokenizer(template_of(name), ENDS[name])
    ends = tokenizer.convert_tokens_to_ids(["<|end|>"]) if name.startswith("phi3") else []  # of generation_config.json
    return Turns(tokenizer, template_of(name), {}, ends, [GUESS] if role == "tool" else [])


@pytest.mark.parametrize(("name", "role"), CASES)
def test_turns_joined_are_the_conversation_as_the_template_writes_it(name: str, role: str) -> None:
    turns = turns_of(name, role)
    turns.check()
    messages = [{"role": "user", "content": "Which number?"}]
    prompt = turns.prompt(messages)
    opened = "<think>\n" if prompt.endswith("<think>\n") else ""  # the policy goes on from there
    answer = "hm\n</think>\n\nI think 5" if opened else "I think 5"
    said = turns.tokenizer.decode(turns.between([SAID[role]], None))
    joined = prompt + answer + said
    if role == "tool" and not turns._knows_tools:
        assert said.count("<tool_response>\nhigher\n</tool_response>") == 1
        messages += [{"role": "assistant", "content": opened + answer}, {"role": "user", "content": "@"}]
        expected = turns.prompt(messages).replace("@", "<tool_response>\nhigher\n</tool_response>")
    else:
        expected = turns.prompt([*messages, {"role": "assistant", "content": opened + answer}, SAID[role]])
    # Thinking templates begin a turn with an empty thought, which is the prompt's if the policy has none.
    assert joined == expected.replace("<think>\n\n</think>\n\n", "")
    if role == "tool":
        assert "guess" in prompt
        assert "integer" in prompt


@pytest.mark.parametrize(("name", "role"), CASES)
def test_a_turn_that_was_cut_off_is_ended_and_one_that_ended_is_not_ended_again(name: str, role: str) -> None:
    turns = turns_of(name, role)
    cut = turns.between([SAID[role]], None)
    assert cut[0] in turns.ends
    assert turns.between([SAID[role]], cut[0]) == cut[1:]
    assert turns.between([SAID[role]], 7) == cut


@pytest.mark.parametrize("role", ["user", "tool"])
@pytest.mark.parametrize(
    ("name", "end", "eos"),
    [
        ("qwen2_5", "<|im_end|>", "<|endoftext|>"),
        ("llama3_2", "<|eot_id|>", "<|end_of_text|>"),
        ("gemma3", "<end_of_turn>", "<eos>"),
        ("phi3", "<|end|>", "<|endoftext|>"),
    ],
)
def test_a_special_token_at_which_sampling_stops_ends_a_turn_as_an_end_of_sequence_does(
    name: str, end: str, eos: str, role: str
) -> None:
    tokenizer = byte_tokenizer(template_of(name), eos)
    number = tokenizer.convert_tokens_to_ids(end)
    environments = Environments(Guessing if role == "tool" else Talking)
    source = PromptSource(rows=[{"prompt": "Which number?", "answer": ""}])
    told = rf"ends an answer with .*{re.escape(end)}.* \(token {number}\).*stop_token_ids"
    for stops in ((), (7,)):
        with pytest.raises(ValueError, match=told):
            prompts.turns_of(source, tokenizer, (), environments, stops)
    turns = prompts.turns_of(source, tokenizer, (), environments, (7, number))
    usual = prompts.turns_of(source, tokenizer, [number], environments)
    for last in (None, 7, number):
        assert turns.between([SAID[role]], last) == usual.between([SAID[role]], last)
    assert turns.words([*turns.ids("five"), 7, number]) == "five" + tokenizer.decode([7])  # what stops, too, is text


@pytest.mark.parametrize("name", FORGETFUL)
@pytest.mark.parametrize("role", ["user", "tool"])
def test_a_template_that_rewrites_turns_is_refused(name: str, role: str) -> None:
    turns = turns_of(name, role)
    if role not in FORGETFUL[name]:
        return turns.check()
    with pytest.raises(ValueError, match=r"otherwise once another follows.*get_training_chat_template"):
        turns.check()
    turns.tokenizer.chat_template = template_of(name)
    training = get_training_chat_template(turns.tokenizer)
    assert training is not None
    Turns(turns.tokenizer, training, {}, (), turns.tools).check()
    return None


def test_plain_text_follows_an_end_of_text(policy_path: str) -> None:
    tokenizer = load_tokenizer(policy_path)
    turns = Turns(tokenizer, None)
    turns.check()
    said = [{"role": "user", "content": "1 + 2"}]
    words = tokenizer("1 + 2")["input_ids"]
    assert turns.between(said, None) == [tokenizer.eos_token_id, *words]
    assert turns.between(said, tokenizer.eos_token_id) == words


def test_tools_are_described_where_the_template_does_not() -> None:
    chatml = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    chatml += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    turns = Turns(byte_tokenizer(chatml, "<|im_end|>"), chatml, tools=[GUESS])
    begun = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Which number?"}]
    prompt = turns.prompt(begun)
    assert prompt.startswith("<|im_start|>system\nBe brief.\n\nYou may call functions")
    assert prompt.endswith("<|im_start|>user\nWhich number?<|im_end|>\n<|im_start|>assistant\n")
    assert '"name": "guess"' in prompt


@pytest.mark.parametrize("name", ["qwen2_5", "llama3_2", "phi3", "gemma3"])
def test_random_turns_stay_as_they_were_sampled_special_tokens_too(name: str) -> None:
    draw, turns = random.Random(0), turns_of(name)
    vocabulary, observed = len(turns.tokenizer), turns.between([SAID["user"]], None)
    for _ in range(20):
        read = turns.ids(turns.prompt([{"role": "user", "content": "Which number?"}]))
        sampled = []
        for _ in range(3):
            turn = [draw.randrange(vocabulary) for _ in range(draw.randint(1, 12))]
            start = len(read)
            read = [*read, *turn, *turns.between([SAID["user"]], turn[-1])]
            sampled.append((start, turn))
            assert read[-len(observed) + 1 :] == observed[1:]
        assert all(read[start : start + len(turn)] == turn for start, turn in sampled)
