"""The table of students with a teacher and without, from the files that the runs leave."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.end_to_end import distillation, learning

METRICS = "step,reward/mean,rollout/tokens,train/divergence\n0,0.1,100,{}\n1,0.3,50,{}\n"


@pytest.mark.parametrize("given", [[], ["--teacher", "given"]])
def test_both_arms_have_their_best_setting_and_are_rows_beside_each_other(
    given: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[list[str]] = []

    def call(command: list[str], **_: Any) -> int:
        started.append(command)
        if "fit" in command:
            folder = Path(command[command.index("--trainer.default_root_dir") + 1])
            (folder / "csv/version_0").mkdir(parents=True)
            is_taught = distillation.OVERLAY in command
            values = (0.5, 0.25) if is_taught else ("", "")
            (folder / "csv/version_0/metrics.csv").write_text(METRICS.format(*values))
            best = (
                "--model.optimizer.init_args.lr=0.02" in command
                and f"--data.num_minibatches={1 + is_taught}" in command
            )
            summary = {"held_out_accuracy_before": 0.25, "held_out_accuracy_after": 0.5 + 0.25 * best}
            (folder / "summary.json").write_text(json.dumps(summary))
        return 0

    monkeypatch.setattr(learning, "ROOT", tmp_path)
    monkeypatch.setattr(distillation.subprocess, "call", call)
    grid = ["--rates", "0.01", "0.02", "--steps", "1", "2"]
    distillation.main([*given, *grid, "--recipe", "a.yaml", "--seeds", "4", "--out", str(tmp_path)])
    teacher = given[-1] if given else str(tmp_path / "outputs/learning/a_teacher_0/policy")
    assert [command[3] for command in started] == [*(["fit", "export"] if not given else []), *["fit"] * 10]
    assert f"--model.reference={teacher}" in started[-1]
    assert {"--data.group_size=1", "--data.prompts_per_iteration=256"} < set(started[-1])
    assert {"--data.group_size=8", "--data.prompts_per_iteration=32"} < set(started[-2])
    table = (tmp_path / "distillation_a.md").read_text()
    assert "| GRPO | 4 | 0.02 | 1 | 150 | 0.25 | 0.75 | - | - |" in table
    assert "| Distillation | 4 | 0.02 | 2 | 150 | 0.25 | 0.75 | 0.5 | 0.25 |" in table
    assert table.count("| 3 | 0.01 |") == 4
