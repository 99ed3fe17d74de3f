"""The benchmark of the selectors still runs and reports what it measured."""

import json

from benchmarks.simulation import selector_regret as benchmark
from benchmarks.simulation.simulator import Workload, constant


def test_regret_is_measured_printed_and_written(monkeypatch, tmp_path, capsys):
    workload = Workload(acceptance={"learned": constant(0.8)}, num_requests=4, max_length=64)
    monkeypatch.setattr(benchmark, "SCENARIOS", {"tiny": workload})
    benchmark.main(["--num-seeds", "2", "--out", str(tmp_path)])
    written = json.loads((tmp_path / "selector_regret.json").read_text())
    tiny = written["scenarios"]["tiny"]
    assert tiny["best_fixed"] in ("K=3", "K=5", "K=7")
    assert min(tiny["slower"]["K=0"]) > 0.3
    assert len(tiny["slower"]["oracle"]) == 2
    assert all(abs(value) < 0.1 for value in tiny["slower"]["oracle"])
    report = (tmp_path / "selector_regret.md").read_text()
    assert report in capsys.readouterr().out
    assert report.count("| tiny |") == 1
