import io
import logging
import re
import sys
import time
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
from rich.console import Console
from rich.file_proxy import FileProxy

from tests.support.rollout_loop import LoggingModule, RolloutLoop, make_rollout, make_trainer, progress
from tlt_lightning.callbacks.progress_bar import RolloutProgressBar, say


def make_rollouts(iteration: int) -> list[Any]:
    return [make_rollout(reward, length=10 * iteration, cut=reward == 0) for reward in (1.0, 0.0, 0.5, 0.5)]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_fit_prints_one_line_per_iteration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = RolloutLoop(make_rollouts, progress=[progress()] * 5)
    make_trainer(tmp_path, [RolloutProgressBar()]).fit(LoggingModule(), datamodule=data)
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "before training  val/accuracy 0.200",
        *(
            f"iteration {i}/3  reward 0.500 ± 0.354{'  val accuracy 0.200' if i == 2 else ''}  "
            f"length p50 {i}0 max {i}0  truncated 25.0%  1,234 tok/s  3.5 s (rollout 2.0 update 1.0 sync 0.5 other 0.0)"
            for i in (1, 2, 3)
        ),
    ]


def test_accuracy_before_training_says_of_how_many_prompts_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = make_trainer(tmp_path, [RolloutProgressBar()], num_sanity_val_steps=2, max_epochs=1)
    trainer.fit(LoggingModule(), datamodule=RolloutLoop(make_rollouts))
    assert capsys.readouterr().out.startswith("before training  val/accuracy 0.200  (2 of 3 held-out prompts)\n")
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    resumed = make_trainer(tmp_path, [RolloutProgressBar()], num_sanity_val_steps=3, max_epochs=2)
    resumed.fit(LoggingModule(), datamodule=RolloutLoop(make_rollouts), ckpt_path=tmp_path / "one.ckpt")
    assert capsys.readouterr().out.startswith("before going on  val/accuracy 0.200\niteration 2/2")


def test_lightning_s_bar_counts_iterations_as_the_lines_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", Terminal())
    trainer = make_trainer(tmp_path, [RolloutProgressBar(), RichProgressBar()], enable_progress_bar=True, max_epochs=2)
    trainer.fit(LoggingModule(), datamodule=RolloutLoop(make_rollouts))
    assert trainer.progress_bar_callback.train_progress_bar.description == "iteration 2/2"


class Notebook(io.StringIO):
    def write(self, text: str) -> int:
        sys.stdout.flush()  # as a kernel does before it displays anything
        return super().write(text)


def test_several_lines_are_said_in_a_notebook_with_lightning_s_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = Notebook()
    monkeypatch.setattr(sys, "stdout", FileProxy(Console(file=notebook), notebook))
    say("run finished\n  report")
    assert notebook.getvalue() == "run finished\n  report\n"


@pytest.mark.parametrize("bar", [TQDMProgressBar, RichProgressBar])
def test_lightning_s_bar_leaves_no_picture_where_there_is_no_terminal(
    bar: type[L.Callback], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    trainer = make_trainer(tmp_path, [RolloutProgressBar(), bar()], enable_progress_bar=True)
    trainer.fit(LoggingModule(), datamodule=RolloutLoop(make_rollouts))
    said = capfd.readouterr()
    assert "3/3" in said.out
    assert "it/s" not in said.out + said.err


def test_only_rank_zero_prints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(L.Trainer, "is_global_zero", False)
    bar = RolloutProgressBar(show_completions=2)
    data = RolloutLoop(make_rollouts, progress=[progress(elapsed=60.0)])
    make_trainer(tmp_path, [bar]).fit(LoggingModule(), datamodule=data)
    assert capsys.readouterr().out == ""


def test_without_a_terminal_a_rollout_writes_a_line_every_ten_seconds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(1000))  # one progress call a second
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(clock)))
    bar = RolloutProgressBar(refresh_seconds=0.1)
    trainer = make_trainer(tmp_path, [bar])
    bar.on_rollout_start(trainer, LoggingModule())
    for second in range(35):
        bar.on_rollout_progress(trainer, LoggingModule(), progress(elapsed=float(second)))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert lines[0] == "rollout 1/3: 3/6 finished, running 2, waiting 1, 60 tok/s, longest 128"


@pytest.mark.parametrize("lightning_bar", [TQDMProgressBar, RichProgressBar, None])
def test_bar_in_a_terminal_shows_the_rollout_and_goes_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lightning_bar: type[L.Callback] | None
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERM", "xterm-256color")
    bars = [] if lightning_bar is None else [lightning_bar()]
    data = RolloutLoop(make_rollouts, progress=[progress()])
    trainer = make_trainer(
        tmp_path, [RolloutProgressBar(refresh_seconds=1e-9), *bars], max_epochs=1, enable_progress_bar=bool(bars)
    )
    trainer.fit(LoggingModule(), datamodule=data)
    screen = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", terminal.getvalue())
    assert "rollout 1/1" in screen
    assert "validation before training" in screen
    assert "running 2, waiting 1, 300 tok/s, longest 128" in screen
    assert "3/6" in screen
    assert "iteration 1/1  reward 0.500" in screen.rsplit("rollout 1/1", 1)[1]


def test_rich_bars_stand_below_what_is_logged_and_leave_with_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal, log = Terminal(), logging.getLogger("lightning")
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setattr(log, "handlers", [logging.StreamHandler(sys.stderr)])
    steps = (log.warning("step %d", step) or progress() for step in (1, 2))
    trainer = make_trainer(tmp_path, [RolloutProgressBar(), RichProgressBar()], enable_progress_bar=True, max_epochs=1)
    trainer.fit(LoggingModule(), datamodule=RolloutLoop(make_rollouts, progress=steps))
    assert "\x1b[2Kstep 1\n" in terminal.getvalue()  # a line of its own, above bars that are drawn anew
    assert terminal.getvalue().endswith("\x1b[1A\x1b[2K")  # back over what was drawn last


def test_exception_closes_the_bar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", Terminal())
    bar = RolloutProgressBar()

    def fail(iteration: int) -> list[Any]:
        assert bar._display is not None
        raise RuntimeError("engine died")

    trainer = make_trainer(tmp_path, [bar], num_sanity_val_steps=0)
    with pytest.raises(RuntimeError, match="engine died"):
        trainer.fit(LoggingModule(), datamodule=RolloutLoop(fail, progress=[progress()]))
    assert bar._display is None


def test_rollouts_beside_training_are_labelled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = RolloutLoop(make_rollouts)
    trainer = make_trainer(tmp_path, [RolloutProgressBar(show_completions=1)])
    trainer.validate(LoggingModule(), datamodule=data, verbose=False)
    trainer.test(LoggingModule(), datamodule=data, verbose=False)
    trainer.predict(LoggingModule(), datamodule=data)
    titles = [line.strip() for line in capsys.readouterr().out.splitlines() if line.startswith("completions")]
    assert titles == ["completions, validation", "completions, test", "completions, prediction"]


def test_a_throttled_progress_call_reads_the_clock_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", Terminal())
    bar, module = RolloutProgressBar(refresh_seconds=1000.0), LoggingModule()
    trainer = make_trainer(tmp_path, [bar])
    bar.on_rollout_start(trainer, module)
    bar.on_rollout_progress(trainer, module, progress())
    bar.on_rollout_progress(trainer, module, None)  # type: ignore[arg-type]
    bar.teardown(trainer, module, "fit")


@pytest.mark.parametrize(
    ("arguments", "match"),
    [({"show_completions": -1}, "`show_completions`.*got -1"), ({"refresh_seconds": 0.0}, "`refresh_seconds`.*got 0")],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        RolloutProgressBar(**arguments)
