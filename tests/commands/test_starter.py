"""The list of `recipes` and the folder of `init`; every recipe runs in such a folder in tests/recipes."""

import ast
import re
import sys
from pathlib import Path

import pytest
import yaml

from tlt_lightning import LongTailIdleCallback
from tlt_lightning.commands.cli import run_cli
from tlt_lightning.commands.starter import RECIPES, read_recipes, run_init, run_recipes, write_start
from tlt_lightning.long_tail.supervised import SupervisedDrafterCallback


def test_every_recipe_is_listed_with_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    run_recipes([])
    lines = capsys.readouterr().out.split("\n\n")[0].splitlines()
    assert [line.split()[0] for line in lines] == list(read_recipes())
    assert all(line.endswith(".") and len(line.split()) > 3 for line in lines)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("quickstart", ["python -m tlt_lightning fit -c recipes/quickstart.yaml -c mine.yaml"]),
        (
            "drafter_warmup",
            [
                "python -m tlt_lightning predict -c recipes/quickstart.yaml -c mine.yaml",
                "python -m tlt_lightning drafter fit -c recipes/drafter_warmup.yaml",
            ],
        ),
        (
            "quickstart_smollm2",
            [
                "python recipes/assets/make_smollm2.py models/SmolLM2-135M-Instruct",
                "python -m tlt_lightning fit -c recipes/quickstart_smollm2.yaml -c mine.yaml",
            ],
        ),
        (
            "smollm2_searches_1gpu",
            [
                "python -m tlt_lightning export --ckpt_path outputs/sft_smollm2_searches/checkpoints/last.ckpt "
                "--output_dir outputs/sft_smollm2_searches/policy",  # which takes no settings
                "python -m tlt_lightning fit -c recipes/quickstart.yaml -c recipes/smollm2_searches_1gpu.yaml "
                "-c mine.yaml",
            ],
        ),
    ],
)
def test_init_writes_what_its_commands_name(
    name: str, expected: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_init([str(tmp_path / "my run"), "--recipe", name])
    change, *commands = (line.strip() for line in capsys.readouterr().out.split("\n\n")[1].splitlines())
    assert change == f"cd '{tmp_path / 'my run'}'"
    assert commands == expected
    files = [word for command in commands for word in command.split() if word.endswith((".yaml", ".py"))]
    assert [file for file in files if not (tmp_path / "my run" / file).is_file()] == []
    ast.parse((tmp_path / "my run/my_reward.py").read_text())
    assert (tmp_path / "my run/callbacks/length_histogram.py").is_file()


@pytest.mark.parametrize(
    ("page", "heading"), [("docs/index.md", "## Faster rollouts"), ("recipes/README.md", "`speculation.yaml` goes")]
)
def test_a_folder_has_the_overlays_that_pages_promise(page: str, heading: str, tmp_path: Path) -> None:
    write_start(tmp_path / "run", read_recipes()["quickstart"])
    promised = (RECIPES.resolve().parent / page).read_text().partition(f"\n{heading}")[2].partition("\n## ")[0]
    names = set(re.findall(r"`(?:-c recipes/)?(\w+\.yaml)`", promised)) - {"mine.yaml", "drafter_warmup.yaml"}
    assert {"speculation.yaml", "ray.yaml"} <= names <= {path.name for path in (tmp_path / "run/recipes").iterdir()}


@pytest.mark.slow
def test_what_init_recommends_next_runs_in_its_folder_with_what_mine_yaml_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = str(RECIPES / "assets/countdown/policy")
    monkeypatch.chdir(tmp_path)
    run_init(["run", "--recipe", "grpo_qwen2.5-0.5b_1gpu"])
    overlays = re.findall(r"`(-c recipes/\S+)`", capsys.readouterr().out)
    monkeypatch.chdir("run")
    monkeypatch.syspath_prepend(tmp_path / "run")
    mine = Path("mine.yaml").read_text()
    Path("mine.yaml").write_text(mine.replace("{policy: Qwen/Qwen2.5-0.5B-Instruct}", f"{{policy: {policy}}}"))
    words = " ".join(["-c recipes/grpo_qwen2.5-0.5b_1gpu.yaml", *overlays, "-c mine.yaml"])
    cli = run_cli([*words.split(), "--trainer.accelerator", "cpu"], run=False)
    (drafting,) = (callback for callback in cli.trainer.callbacks if isinstance(callback, LongTailIdleCallback))
    assert cli.model.policy_path == drafting.drafter.target == policy
    assert cli.datamodule.engine.speculation.siblings


def test_a_folder_for_texts_says_which_of_them_are_read_and_what_goes_on_top(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run_init(["run", "--recipe", "sft_quickstart"])
    said = capsys.readouterr().out
    assert "speculation" not in said  # nothing is rolled out
    overlays = re.findall(r"`(-c recipes/\S+)`", said)
    monkeypatch.chdir("run")
    mine = yaml.safe_load(Path("mine.yaml").read_text())["data"]["init_args"]
    assert (mine["train"]["split"], mine["val"]["split"]) == ("train[64:]", "train[:64]")
    words = " ".join(["-c recipes/sft_quickstart.yaml", *overlays, "-c mine.yaml"])
    cli = run_cli(words.split(), run=False)
    assert any(isinstance(callback, SupervisedDrafterCallback) for callback in cli.trainer.callbacks)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["countdown_tries", "calculator_smollm2", "code_tries_1gpu"])
def test_an_environment_is_copied_for_its_user_to_change(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run_init(["run", "--recipe", name])
    said = capsys.readouterr().out
    assert "yours: mine.yaml and my_reward.py and my_environment.py." in said
    monkeypatch.chdir("run")
    monkeypatch.syspath_prepend(tmp_path / "run")
    monkeypatch.delitem(sys.modules, "my_environment", raising=False)
    command = said.split("\n\n")[1].splitlines()[-1].split()
    cli = run_cli([*command[4:], "--trainer.accelerator", "cpu"], run=False)
    environment = cli.datamodule.environment
    assert type(environment).__module__ == "my_environment"
    assert sys.modules["my_environment"].__file__ == str(tmp_path / "run/my_environment.py")
    if name == "countdown_tries":
        assert (environment.tries, environment.patience) == (3, 0.7)
    monkeypatch.delitem(sys.modules, "my_environment")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([".", "--recipe", "recipes/quickstart.yaml"], "`folder` '.' exists already; name a new one."),
        (["."], "`folder` '.' exists already; name a new one."),
        (["new", "--recipe", "quick"], "`--recipe` must be one of adaptive_drafter, "),
    ],
)
def test_what_init_cannot_do_is_refused_before_it_writes(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        run_init(arguments)
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
