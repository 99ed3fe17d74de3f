"""The table of a recipe over seeds, from the summaries that the runs leave."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.end_to_end import learning


def test_each_seed_is_a_run_and_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []

    def run(command: list[str], **options: Any) -> None:
        started.append(command)
        folder = Path(command[command.index("--trainer.default_root_dir") + 1])
        folder.mkdir(parents=True)
        seed = int(command[command.index("--seed_everything") + 1])
        summary = {"seed": seed, "held_out_accuracy_before": 0.25, "held_out_accuracy_after": 0.5 + seed / 8}
        (folder / "summary.json").write_text(json.dumps(summary))

    monkeypatch.setattr(learning, "ROOT", tmp_path)
    monkeypatch.setattr(learning.subprocess, "run", run)
    learning.main(["--recipe", "a.yaml", "b.yaml", "--seeds", "1", "2", "--out", str(tmp_path)])
    assert [command[3:8] for command in started] == [["fit", "-c", "a.yaml", "-c", "b.yaml"]] * 2
    runs = json.loads((tmp_path / "learning_b.json").read_text())["runs"]
    assert [(run["seed"], run["accuracy_after"], run["gain"]) for run in runs] == [(1, 0.625, 0.375), (2, 0.75, 0.5)]
    assert "| 2 | 0.25 | 0.75 | 0.5 |" in (tmp_path / "learning_b.md").read_text()
