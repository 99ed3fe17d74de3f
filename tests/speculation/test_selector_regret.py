"""The benchmark of the selectors still runs and reports what it measured."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

from tlt_lightning.speculation.simulator import Workload, constant


@pytest.fixture
def benchmark() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "selector_regret.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_regret_is_measured_printed_and_written(benchmark, monkeypatch, tmp_path, capsys):
    workload = Workload(acceptance={"learned": constant(0.8)}, num_requests=4, max_length=64)
    monkeypatch.setattr(benchmark, "SCENARIOS", {"tiny": workload})
    benchmark.main(["--num-seeds", "2", "--output", str(tmp_path)])
    written = json.loads((tmp_path / "selector_regret.json").read_text())
    assert written["seeds"] == [0, 1]
    assert written["command"] == "python benchmarks/selector_regret.py --num-seeds 2"
    tiny = written["scenarios"]["tiny"]
    assert tiny["best_fixed"] in ("K=3", "K=5", "K=7")
    assert min(tiny["slower_than_best_fixed"]["K=0"]) > 0.3
    assert all(abs(value) < 0.1 for value in tiny["slower_than_best_fixed"]["oracle"])
    assert tiny["slower_than_oracle"]["oracle"] == [0.0, 0.0]
    report = (tmp_path / "selector_regret.md").read_text()
    assert report in capsys.readouterr().out
    assert report.count("| tiny |") == 2
