"""The Hugging Face reward model, on a tiny random one."""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2ForSequenceClassification, Qwen2Tokenizer

from tlt_lightning.rewards import RewardModel

LETTERS = dict(zip("abcdefghijklmnopqrstuvwxyz:=", range(28), strict=True))
TEMPLATE = "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}{% endfor %}"


def save(
    folder: Path, model_class: Any = Qwen2ForSequenceClassification, template: str | None = None, **config: Any
) -> str:
    tokenizer = Qwen2Tokenizer(vocab=LETTERS, merges=[])
    tokenizer._tokenizer.post_processor = TemplateProcessing(single="= $A", special_tokens=[("=", LETTERS["="])])
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    model_class(Qwen2Config(**sizes, **heads, **config)).save_pretrained(folder)
    return str(folder)


def logit(folder: str, text: str) -> float:
    ids = torch.tensor([[LETTERS[letter] for letter in text]])
    with torch.no_grad():
        return Qwen2ForSequenceClassification.from_pretrained(folder)(input_ids=ids).logits.item()


def test_the_score_is_the_logit_of_prompt_and_response(tmp_path: Path) -> None:
    folder = save(tmp_path, num_labels=1)
    reward = RewardModel(folder)
    assert reward("two=", "four", {}) == pytest.approx(logit(folder, "=two=four"))
    assert reward("two=", "four", {}) != pytest.approx(logit(folder, "=two=five"))
    assert RewardModel(folder, device="meta").load()[1].device.type == "meta"


def test_a_chat_template_is_used(tmp_path: Path) -> None:
    folder = save(tmp_path, num_labels=1, template=TEMPLATE)
    score = RewardModel(folder)("two", "four", {})
    assert score == pytest.approx(logit(folder, "user:twoassistant:four"))


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
    assert isinstance(reward("ab", "c", {}), float)
    with pytest.raises(ValueError, match="have 5 tokens, more than `max_length` 4"):
        reward("ab", "cd", {})


def test_several_outputs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"one output, but .* has 3"):
        RewardModel(save(tmp_path, num_labels=3)).load()


def test_a_language_model_is_refused(tmp_path: Path) -> None:
    folder = save(tmp_path, model_class=Qwen2ForCausalLM, num_labels=1)
    with pytest.raises(ValueError, match=r"^The files of `model` '.*' lack score\.weight: .* random values"):
        RewardModel(folder).load()


def test_a_model_that_is_nowhere_is_named() -> None:
    with pytest.raises(ValueError, match=r"`model` './no/such/folder' is no folder that `save_pretrained` wrote"):
        RewardModel("./no/such/folder").load()
