"""The list of `recipes` and the folder of `init`; every recipe runs in such a folder in tests/recipes."""

import ast
from pathlib import Path

import pytest

from tlt_lightning.commands.starter import read_recipes, run_init, run_recipes


def test_every_recipe_is_listed_with_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    run_recipes([])
    lines = capsys.readouterr().out.split("\n\n")[0].splitlines()
    assert [line.split()[0] for line in lines] == list(read_recipes())
    assert all(line.endswith(".") and len(line.split()) > 3 for line in lines)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("quickstart", ["python -m tlt_lightning fit -c recipes/base.yaml -c recipes/quickstart.yaml -c mine.yaml"]),
        (
            "drafter_warmup",
            [
                "python -m tlt_lightning predict -c recipes/base.yaml -c recipes/quickstart.yaml -c mine.yaml",
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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
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
