"""What importing costs and what it must not load."""

import subprocess
import sys

import pytest

import tlt_lightning


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_import_loads_nothing_heavy() -> None:
    heavy = ("vllm", "speculators", "transformers", "peft", "datasets")
    code = f"import sys, tlt_lightning; print([name for name in {heavy} if name in sys.modules])"
    assert run(code).strip() == "[]"


def test_import_costs_no_more_than_lightning() -> None:
    def seconds(module: str) -> float:
        # By processor time: others may want the cores, too.
        return float(
            run(f"from time import process_time as now; started = now(); import {module}; print(now() - started)")
        )

    assert seconds("tlt_lightning") <= 1.2 * seconds("lightning")


@pytest.mark.parametrize("name", sorted(set(tlt_lightning.__all__) - {"__version__"}))
def test_public_names_exist(name: str) -> None:
    assert getattr(tlt_lightning, name).__name__ == name


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="RLModul"):
        tlt_lightning.RLModul


@pytest.mark.parametrize("module", ["module", "data.batch", "engine", "objectives"])
def test_every_module_can_be_imported_first(module: str) -> None:
    run(f"import tlt_lightning.{module}")
