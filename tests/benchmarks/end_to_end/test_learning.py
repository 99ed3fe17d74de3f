"""Table, curves and picture of a recipe over seeds and arms, from the files that the runs leave."""

import json
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest

from benchmarks.end_to_end import learning

METRICS = "step,reward/mean,val/accuracy,time/iteration,time/drafter\n0,0.1,,3.0,1.0\n1,,0.5,,\n1,0.3,,5.0,2.0\n"


Commands = list[list[str]]


def value_of(command: list[str], option: str) -> str:
    """Return what follows an option."""
    return command[command.index(option) + 1]


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Commands:
    """Return the commands of the runs, which leave their files at once."""
    started: Commands = []

    def call(command: list[str]) -> int:
        started.append(command)
        folder, seed = (
            Path(value_of(command, "--trainer.default_root_dir")),
            int(value_of(command, "--seed_everything")),
        )
        (folder / "csv/version_0").mkdir(parents=True)
        (folder / "csv/version_0/metrics.csv").write_text(METRICS)
        summary = {"seed": seed, "held_out_accuracy_before": 0.25, "held_out_accuracy_after": 0.5 + seed / 8}
        (folder / "summary.json").write_text(json.dumps({**summary, "iterations": 2, "seconds": 9.0}))
        return 0

    monkeypatch.setattr(learning, "ROOT", tmp_path)
    monkeypatch.setattr(learning.subprocess, "call", call)
    return started


@pytest.mark.slow
@pytest.mark.parametrize("at_once", ["1", "4"])
def test_each_arm_and_seed_is_a_run_and_a_row(at_once: str, commands: Commands, tmp_path: Path) -> None:
    arms = ["--arms", "plain", "head=c.yaml,d.yaml,--a.b=null"]
    recipe = ["--recipe", "a.yaml", "b.yaml", "--seeds", "1", "2"]
    learning.main([*recipe, *arms, "--at-once", at_once, "--out", str(tmp_path)])
    files = sorted([part for part in command[4:12] if part.endswith(".yaml")] for command in commands)
    assert files == [["a.yaml", "b.yaml"]] * 2 + [["a.yaml", "b.yaml", "c.yaml", "d.yaml"]] * 2
    assert sorted("--a.b=null" in command for command in commands) == [False, False, True, True]
    runs = json.loads((tmp_path / "learning_b.json").read_text())["runs"]
    assert [(run["arm"], run["seed"]) for run in runs] == [("plain", 1), ("plain", 2), ("head", 1), ("head", 2)]
    assert runs[0]["curves"]["reward/mean"] == [[1, 0.1], [2, 0.3]]
    assert runs[0]["curves"]["val/accuracy"] == [[0, 0.25], [2, 0.5]]
    assert "| head | 2 | 2 | 0.25 | 0.75 | 0.1 | 0.3 | 4 | - | 1.5 | 9 |" in (tmp_path / "learning_b.md").read_text()
    assert (tmp_path / "learning_b.png").stat().st_size > 10_000


def test_every_arm_has_a_line_in_the_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [{"arm": f"arm {number}", "curves": {"reward/mean": [[1, 0.1], [2, 0.3]]}} for number in range(5)]
    drawn: list[Any] = []
    monkeypatch.setattr(learning.plots, "save", lambda figure, path: drawn.append(figure))
    learning.picture(runs, tmp_path / "rewards.png")
    assert [text.get_text() for text in drawn[0].axes[0].get_legend().get_texts()] == [run["arm"] for run in runs]


@pytest.mark.slow
def test_runs_go_side_by_side(commands: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finish, together = learning.subprocess.call, Barrier(3, timeout=200)
    monkeypatch.setattr(learning.subprocess, "call", lambda command: together.wait() * 0 + finish(command))
    learning.main(["--recipe", "b.yaml", "--at-once", "3", "--out", str(tmp_path)])
    assert len(commands) == 3


def test_what_did_not_fail_is_kept_beside_what_did(commands: Commands, tmp_path: Path, monkeypatch) -> None:
    finish = learning.subprocess.call

    def fail_second(command: list[str]) -> int:
        return finish(command) or int(value_of(command, "--seed_everything") == "2")

    monkeypatch.setattr(learning.subprocess, "call", fail_second)
    with pytest.raises(SystemExit, match=r"arm .plain., seed 2, failed: .* --seed_everything 2"):
        learning.main(["--recipe", "b.yaml", "--seeds", "2", "3", "--out", str(tmp_path)])
    results = json.loads((tmp_path / "learning_b.json").read_text())
    assert [run["seed"] for run in results["runs"]] == [3]
    assert "\narm 'plain', seed 2, failed" in (tmp_path / "learning_b.md").read_text()


def test_a_run_that_fails_ends_the_benchmark_with_its_command(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(learning, "ROOT", tmp_path)
    monkeypatch.setattr(learning.sys, "executable", "false")
    with pytest.raises(SystemExit, match="arm 'plain', seed 1, failed: false -m tlt_lightning fit"):
        learning.main(["--recipe", "a.yaml", "--seeds", "1", "--out", str(tmp_path)])


@pytest.mark.parametrize(("goal", "seconds"), [(0.19, 12.0), (0.39, 22.0), (0.6, None)])
def test_a_reward_is_reached_when_three_iterations_have_it_in_the_mean(goal: float, seconds: float | None) -> None:
    rewards, times = (0.1, 0.2, 0.3, 0.2, 0.7), (3.0, 4.0, 5.0, 4.0, 6.0)
    run = {"curves": {"reward/mean": [*enumerate(rewards)], "time/iteration": [*enumerate(times)]}}
    assert learning.seconds_to(run, goal) == seconds
