"""What importing costs and what it must not load."""

import subprocess
import sys

import pytest

import tlt_lightning


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_import_loads_nothing_but_itself_and_lightning() -> None:
    code = "import sys, lightning; before = set(sys.modules); import tlt_lightning; print(*set(sys.modules) - before)"
    assert {name.partition(".")[0] for name in run(code).split()} == {"tlt_lightning"}


@pytest.mark.parametrize("name", sorted(set(tlt_lightning.__all__) - {"__version__"}))
def test_public_names_exist(name: str) -> None:
    assert getattr(tlt_lightning, name).__name__ == name


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="RLModul"):
        tlt_lightning.RLModul


@pytest.mark.parametrize("module", ["module", "data.batch", "engine", "objectives"])
def test_every_module_can_be_imported_first(module: str) -> None:
    run(f"import tlt_lightning.{module}")
