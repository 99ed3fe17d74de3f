"""A real model: converted from its package, it reads and writes as it was taught, and learns."""

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.target.text import spelling_of, write_row
from recipes.assets.make_countdown import EOS, make_tokenizer
from tests.support.rl_runs import Recorder
from tlt_lightning import RewardTerm
from tlt_lightning.commands.cli import run_cli
from tlt_lightning.data.prompts import PromptSource, turns_of
from tlt_lightning.data.texts import AnsweredRows
from tlt_lightning.environments.environments import Environments
from tlt_lightning.environments.turn import read_calls
from tlt_lightning.policy import end_token_ids, load_tokenizer
from tlt_lightning.recipes.environments import Calculator

ROOT = Path(__file__).parents[2]
SMOLLM2 = "models/SmolLM2-135M-Instruct"


@pytest.fixture(scope="module")
def smollm2() -> str:
    """The folder that `make test` has made, or makes it from the installed package."""
    if not (ROOT / SMOLLM2 / "model.safetensors").exists():
        subprocess.run([sys.executable, "recipes/assets/make_smollm2.py", SMOLLM2], cwd=ROOT, check=True)
    return str(ROOT / SMOLLM2)


def length(prompt: str, response: str, row: dict[str, Any]) -> float:
    """Something that differs between responses, however few and short."""
    return len(response) / 100


def test_the_tokenizer_is_the_one_the_model_was_trained_with(smollm2: str) -> None:
    tokenizer = load_tokenizer(smollm2)
    assert end_token_ids(smollm2, tokenizer) == tokenizer.convert_tokens_to_ids(["<|im_end|>"])
    text = "is  1234 <|im_end|>"
    # Digits stand alone, also towards the space before them, which GPT-2's splitting would give to the number.
    assert tokenizer.tokenize(text) == ["is", "ĠĠ", "1", "2", "3", "4", "Ġ", "<|im_end|>"]
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_the_benchmarks_text_is_spelled_as_the_tokenizer_spells_it(smollm2: str) -> None:
    tokenizer = load_tokenizer(smollm2)
    words = write_row(random.Random(0), 2000)
    spelled = write_row(random.Random(0), 2000, spelling=spelling_of(tokenizer))
    text = make_tokenizer().decode(words).replace(EOS, str(tokenizer.eos_token))
    assert spelled == tokenizer(text)["input_ids"][:2000]


@pytest.mark.slow
def test_the_texts_with_calls_are_what_the_policy_would_read_and_write_in_a_rollout(smollm2: str) -> None:
    tokenizer, environments = load_tokenizer(smollm2), Environments(Calculator)
    source = PromptSource(path=str(ROOT / "recipes/assets/calculator/calls.jsonl"))
    turns = turns_of(source, tokenizer, end_token_ids(smollm2, tokenizer), environments)
    rows, texts = source.read(), AnsweredRows(source, smollm2, 512).read_all()
    assert len(rows) == len(texts) == 80
    assert sum(len(row["answer"]) == 3 for row in rows) == 40
    for row, text in zip(rows, texts, strict=True):
        question = row["prompt"].rpartition("\n\n")[2]
        assert text.prompt == turns.ids(turns.prompt([{"role": "user", "content": question}]))
        if text.others:
            ((start, stop),) = text.others
            call = text.ids[text.prompt_length : start]
            _, (wanted,) = read_calls(tokenizer, turns.words(call), call, text.prompt, turns.tools)
            result = Calculator().calculate(**wanted.arguments)
            assert text.ids[start:stop] == turns.between(
                [{"role": "tool", "name": wanted.name, "content": str(result)}], call[-1]
            )
            assert turns.words(text.ids[stop:]) == str(result)


@pytest.mark.vllm
@pytest.mark.slow
def test_two_iterations_of_the_quickstart_move_the_real_model(
    smollm2: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    small: dict[str, Any] = {
        "trainer.max_epochs": 2,
        "trainer.num_sanity_val_steps": 0,
        "trainer.callbacks": "null",
        "trainer.enable_checkpointing": "false",
        "trainer.logger": "false",
        "trainer.default_root_dir": tmp_path,
        "data.prompts_per_iteration": 2,
        "data.group_size": 2,
        "data.sampling.max_tokens": 8,
    }
    options = [part for name, value in small.items() for part in (f"--{name}", str(value))]
    cli = run_cli(["-c", "recipes/quickstart_smollm2.yaml", *options], run=False)
    recorder = Recorder()
    cli.trainer.callbacks.append(recorder)
    cli.datamodule.rewards.append(RewardTerm(function=length))
    cli.trainer.fit(cli.model, cli.datamodule)

    rollouts = [rollout for iteration in recorder.rollouts for rollout in iteration]
    assert len(rollouts) == 2 * 2 * 2
    for prompt in (rollout.prompt for rollout in rollouts):
        assert prompt.text == (
            "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
            "<|im_start|>user\nState the final answer to the following arithmetic problem: "
            f"{prompt.row['metadata']['expression']} =<|im_end|>\n<|im_start|>assistant\n"
        )
    metrics = cli.trainer.callback_metrics
    assert metrics["mismatch/logp_abs_diff"] < 1e-4
    assert metrics["train/grad_norm"] > 0
    assert [versions for _, versions in recorder.versions] == [{0}, {1}]  # each wrote with the last's weights
    assert {"reward/math_equivalence", "reward/verify"} <= metrics.keys()
