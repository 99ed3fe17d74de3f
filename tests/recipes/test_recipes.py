"""Every recipe parses, instantiates up to the weights, and its data path runs on rows of its format."""

import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml

from recipes.assets.make_countdown import Question, write_searches
from tests.support.rows import (
    ARC,
    ARC_BAD,
    ARC_GOOD,
    GSM8K,
    GSM8K_BAD,
    GSM8K_GOOD,
    HUMANEVAL,
    HUMANEVAL_BAD,
    HUMANEVAL_GOOD,
)
from tlt_lightning import SupervisedDataModule
from tlt_lightning.checks import check_trainer
from tlt_lightning.commands.cli import run_cli
from tlt_lightning.commands.starter import OVERLAYS, OVERLAYS_OF_TEXTS, read_recipes, write_start
from tlt_lightning.commands.starter import RECIPES as RECIPE_FILES
from tlt_lightning.data.prompts import load_prompts
from tlt_lightning.data.texts import AnsweredRows
from tlt_lightning.policy import load_tokenizer
from tlt_lightning.rewards import RewardPool

pytestmark = pytest.mark.slow

RECIPES = read_recipes()
TEXTS = ["sft_calculator", "sft_drafter", "sft_quickstart", "sft_smollm2", "sft_smollm2_searches"]
# Those of a rollout alone; a draft head's is tested in tests/drafter/test_data.py.
POLICIES = [name for name, recipe in RECIPES.items() if "drafter fit" not in recipe.commands[-1] and name not in TEXTS]
FORMATS = {
    "grpo_qwen2.5-0.5b_1gpu": (GSM8K, GSM8K_GOOD, GSM8K_BAD),
    "grpo_qwen2.5-0.5b_lora_1gpu": (GSM8K, GSM8K_GOOD, GSM8K_BAD),
    "grpo_arc_1gpu": (ARC, ARC_GOOD, ARC_BAD),
    "grpo_humaneval_1gpu": (HUMANEVAL, HUMANEVAL_GOOD, HUMANEVAL_BAD),
}
CHAT = "{% for message in messages %}<{{ message.role }}> {{ message.content }}\n{% endfor %}<assistant>"


def instantiate(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *overrides: str):  # type: ignore[no-untyped-def]
    """Instantiate recipe `name` in the folder that `init` writes for it."""
    *_, command = write_start(tmp_path / "run", RECIPES[name])
    monkeypatch.chdir(tmp_path / "run")
    monkeypatch.syspath_prepend(tmp_path / "run")  # for my_reward.py
    overrides = (*overrides, "--trainer.accelerator", "cpu", "--trainer.default_root_dir", str(tmp_path / "outputs"))
    return run_cli([*shlex.split(command)[4:], *overrides], run=False)


def test_every_recipe_says_how_it_is_run() -> None:
    assert {path.stem for path in RECIPE_FILES.glob("*.yaml")} == set(RECIPES)
    assert [name for name, recipe in RECIPES.items() if f"{name}.yaml" != recipe.files[-1]] == []


def test_the_tables_say_of_every_recipe_what_was_run() -> None:
    """The table of those that were not trained has no column for it."""
    lines = (RECIPE_FILES / "README.md").read_text().splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines if line[:1] == "|" and " | " in line]
    said = {name for _, files, *measured in rows if all(measured) for name in RECIPES if f"`{name}.yaml`" in files}
    assert said == set(RECIPES)


def test_every_recipe_writes_into_a_folder_of_its_own() -> None:
    """A run sets aside what another has left in its folder; overlays go into that of the recipe below them."""
    names = {path.name for path in RECIPE_FILES.glob("*.yaml")} - {*OVERLAYS, *OVERLAYS_OF_TEXTS}
    trainers = {name: yaml.safe_load((RECIPE_FILES / name).read_text()).get("trainer", {}) for name in names}
    assert [name for name, trainer in trainers.items() if "default_root_dir" not in trainer] == []
    assert len({trainer["default_root_dir"] for trainer in trainers.values()}) == len(names)


@pytest.mark.parametrize("name", POLICIES)
def test_recipe_instantiates_and_its_numbers_fit(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cli = instantiate(name, tmp_path, monkeypatch)
    data, trainer = cli.datamodule, cli.trainer
    check_trainer(trainer)
    num_sequences = data.prompts_per_iteration * data.group_size
    assert num_sequences % data.num_minibatches == 0
    assert data.micro_batch_tokens is None  # the device decides
    assert data.group_size >= cli.model.objective.min_group_size
    assert trainer.default_root_dir == str(tmp_path / "outputs")
    folders = [getattr(callback, "dirpath", None) for callback in trainer.callbacks]
    assert all(Path(folder).is_relative_to(tmp_path / "outputs") for folder in folders if folder is not None)


@pytest.mark.parametrize("name", TEXTS)
def test_a_recipe_of_texts_learns_from_them_and_holds_others_out(
    name: str, policy_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = []
    if name == "sft_smollm2_searches":  # whose texts its first command writes
        questions = [Question((a, b), a + b) for a in range(1, 13) for b in range(1, 13)]
        write_searches(tmp_path / "searches.jsonl", questions, seed=0, hasty_share=0.7, must_hit=False)
        overrides = [f"--data.init_args.{part}.path={tmp_path}/searches.jsonl" for part in ("train", "val")]
    cli = instantiate(name, tmp_path, monkeypatch, *overrides)
    data = cli.datamodule
    assert isinstance(data, SupervisedDataModule)
    assert data.batch_size == {"sft_calculator": 4, "sft_smollm2": 16}.get(name, 32)  # mine.yaml says the recipe's
    assert cli.model.objective.learns_from_rows
    learned, held_out = ({row["prompt"] for row in source.read_rows()} for source in (data.train, data.val))
    assert not learned & held_out
    assert AnsweredRows(replace(data.val, chat_template=CHAT), policy_path, 1024).read_all()


@pytest.mark.parametrize("name", FORMATS)
def test_data_path_of_the_recipe_tells_good_responses_from_bad_ones(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy_path: str
) -> None:
    cli = instantiate(name, tmp_path, monkeypatch)
    _, good, bad = FORMATS[name]
    tokenizer = load_tokenizer(policy_path)
    tokenizer.chat_template = CHAT
    prompts = load_prompts(cli.datamodule.train, tokenizer, max_prompt_tokens=cli.datamodule.max_prompt_tokens)
    assert prompts[0].text.endswith("<assistant>")
    task, own = cli.datamodule.rewards
    assert (own.name, own.weight) == ("brevity", 0.0)  # what `init` adds
    pool = RewardPool([task], timeout=cli.datamodule.reward_timeout)
    for number, (prompt, response) in enumerate(zip(prompts * 2, [*good, *bad], strict=True)):
        pool.submit(number, prompt.question, response, prompt.row)
    scores = [sum(score.values()) for score in pool.collect().values()]
    pool.close()
    assert scores == [1.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    "name", [name for name in POLICIES if "gsm_symbolic" in (RECIPE_FILES / f"{name}.yaml").read_text()]
)
def test_calculations_are_judged_by_the_number_they_end_with(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = instantiate(name, tmp_path, monkeypatch).datamodule
    row = next(row for row in data.train.read() if float(row["answer"]) not in (2, 3, 5))
    right, wrong = f"2 + 3 = 5, so it is {row['answer']}", f"{row['answer']} - 2 = 3"
    pool = RewardPool([term for term in data.rewards if term.name != "brevity"])  # which `init` adds
    for number, response in enumerate((right, wrong, "2 + 3 = 5", "I do not know")):
        pool.submit(number, row["prompt"], response, row)
    scores = [sum(score.values()) for score in pool.collect().values()]
    pool.close()
    assert scores == [1.0, 0.0, 0.0, 0.0]


def test_arc_template_lists_the_choices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = instantiate("grpo_arc_1gpu", tmp_path, monkeypatch).datamodule.train
    question = source.messages(ARC[0])[-1]["content"]
    assert question.startswith("Which of these conducts electricity best?\nA. wood\nB. copper\nC. glass\n")


def test_states_of_8_bits_are_one_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cli = instantiate("quickstart", tmp_path, monkeypatch, "--model.optimizer", "torchao.optim.AdamW8bit")
    optimizer = cli.model.optimizer([torch.nn.Parameter(torch.zeros(4096))])
    assert type(optimizer).__name__ == "AdamW8bit"
    assert optimizer.param_groups[0]["lr"].item() > 0
