"""What importing costs and what it must not load."""

import ast
import compileall
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import tlt_lightning

PACKAGE = Path(tlt_lightning.__file__).parent


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


@pytest.fixture(scope="module")
def lines() -> list[str]:
    """Of one process for both tests: torch and transformers take longer than all that is to be seen."""
    return run("""if True:
        import importlib, os, sys
        import lightning

        def first(name):
            before = set(sys.modules)
            if (child := os.fork()) == 0:
                importlib.import_module(name)
                print(name, *set(sys.modules) - before, flush=True)
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0, name

        first("tlt_lightning")
        import lightning.pytorch, torch, transformers
        for name in ("module", "rollout", "engine", "objectives"):
            first(f"tlt_lightning.{name}")
        """).splitlines()


@pytest.mark.slow
def test_import_loads_nothing_but_itself_and_lightning(lines: list[str]) -> None:
    assert {name.partition(".")[0] for name in lines[0].split()} == {"tlt_lightning"}


@pytest.mark.parametrize("name", sorted(set(tlt_lightning.__all__) - {"__version__"}))
def test_public_names_exist(name: str) -> None:
    assert getattr(tlt_lightning, name).__name__ == name


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="RLModul"):
        tlt_lightning.RLModul


@pytest.mark.slow
def test_every_module_can_be_imported_first(lines: list[str]) -> None:
    expected = [
        "tlt_lightning",
        *(f"tlt_lightning.{name}" for name in ("module", "rollout", "engine", "objectives")),
    ]
    assert [line.split()[0] for line in lines] == expected


def test_type_checkers_are_told_the_same_names() -> None:
    stub = ast.parse((PACKAGE / "__init__.pyi").read_text())
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    assert {alias.asname: node.module for node in imports for alias in node.names} == tlt_lightning._HOMES


@pytest.mark.parametrize("form", ["zip", "bytecode"])
def test_the_package_is_imported_where_its_source_cannot_be_read(form: str, tmp_path: Path) -> None:
    copy = shutil.copytree(PACKAGE, tmp_path / "tlt_lightning", ignore=shutil.ignore_patterns("recipes", "__pycache__"))
    if form == "zip":
        where = shutil.make_archive(str(tmp_path / "package"), "zip", tmp_path, "tlt_lightning")
    else:
        where = str(tmp_path)
        compileall.compile_dir(copy, quiet=1, legacy=True)
        for source in copy.rglob("*.py"):
            source.unlink()
    code = (
        f"import sys; sys.path.insert(0, {where!r}); from tlt_lightning import Strategy as s; print(s.__module__, s(3))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path.parent,
        env=os.environ | {"PYTHONPATH": ""},
        capture_output=True,
        text=True,
    )
    assert done.stderr == ""
    assert done.stdout.startswith("tlt_lightning.speculation.strategy ")
