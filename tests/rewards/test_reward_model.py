"""The Hugging Face reward model, on a tiny random one."""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM, Qwen2ForSequenceClassification

from tlt_lightning.rewards import RewardModel

WORDS = ["<unk>", "user", "assistant", ":", "what", "is", "two", "four", "five"]
TEMPLATE = "{% for m in messages %}{{ m['role'] }} : {{ m['content'] }} {% endfor %}"


def save(folder: Path, model_class: Any = Qwen2ForSequenceClassification, template: str | None = None, **config: Any) -> str:
    tokenizer = Tokenizer(WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")
    wrapped.chat_template = template
    wrapped.save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"vocab_size": len(WORDS), "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    model_class(Qwen2Config(**sizes, **heads, **config)).save_pretrained(folder)
    return str(folder)


def logit(folder: str, text: str) -> float:
    ids = torch.tensor([[WORDS.index(word) for word in text.split()]])
    with torch.no_grad():
        return Qwen2ForSequenceClassification.from_pretrained(folder)(input_ids=ids).logits.item()


def test_the_score_is_the_logit_of_prompt_and_response(tmp_path: Path) -> None:
    folder = save(tmp_path, num_labels=1)
    reward = RewardModel(folder)
    assert reward("what is two ", "four", {}) == pytest.approx(logit(folder, "what is two four"))
    assert reward("what is two ", "four", {}) != pytest.approx(logit(folder, "what is two five"))


def test_a_chat_template_is_used(tmp_path: Path) -> None:
    folder = save(tmp_path, num_labels=1, template=TEMPLATE)
    score = RewardModel(folder)("what is two", "four", {})
    assert score == pytest.approx(logit(folder, "user : what is two assistant : four"))


def test_threads_load_it_once(tmp_path: Path, monkeypatch) -> None:
    folder = save(tmp_path, num_labels=1)
    loads: list[str] = []
    from tlt_lightning.rewards import reward_model

    load = reward_model.load_reward_model
    monkeypatch.setattr(reward_model, "load_reward_model", lambda *args: loads.append(args[0]) or load(*args))
    reward = RewardModel(folder)
    assert loads == []
    scores: list[float] = []
    threads = [threading.Thread(target=lambda: scores.append(reward("two", "four", {}))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert loads == [folder]
    assert len(scores) == 4
    assert len(set(scores)) == 1


def test_it_can_be_deep_copied_before_it_is_loaded(tmp_path: Path) -> None:
    assert copy.deepcopy(RewardModel(save(tmp_path, num_labels=1))).max_length == 4096


def test_too_long_is_an_error_rather_than_cut(tmp_path: Path) -> None:
    reward = RewardModel(save(tmp_path, num_labels=1), max_length=4)
    assert isinstance(reward("what is two ", "four", {}), float)
    with pytest.raises(ValueError, match="have 5 tokens, more than `max_length` 4"):
        reward("what is two ", "four five", {})


def test_several_outputs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="one output, but .* has 3"):
        RewardModel(save(tmp_path, num_labels=3)).load()


def test_a_language_model_is_refused(tmp_path: Path) -> None:
    folder = save(tmp_path, model_class=Qwen2ForCausalLM, num_labels=1)
    with pytest.raises(ValueError, match=r"not a trained reward model: its files hold no \['score.weight'\]"):
        RewardModel(folder).load()


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"model": ""}, "`model` must be the folder or hub name"),
        ({"model": "./no/such/folder"}, "`model` must be an existing folder"),
        ({"model": "some/model", "max_length": 0}, "`max_length` must be at least 1"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        RewardModel(**arguments)
