import json
import os
import platform
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from jsonargparse import Namespace
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from lightning.pytorch.cli import LightningArgumentParser, SaveConfigCallback
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from tests.support.report_pages import read_page
from tests.support.rollout_loop import LoggingModule, RolloutLoop, make_rollout, make_trainer, progress
from tlt_lightning.callbacks import report_page, run_facts, run_report
from tlt_lightning.callbacks.run_report import RunReport, summarize


def make_rollouts(iteration: int) -> list[Any]:
    return [make_rollout(0.1 * iteration, length=length * iteration) for length in (10, 20, 100)]


def read_summary(dirpath: Path) -> dict[str, Any]:
    return json.loads((dirpath / "summary.json").read_text())


def fit(path: Path, *, fail_in: int | None = None, ckpt_path: Path | None = None, **settings: Any) -> RunReport:
    """Fit three iterations with a checkpoint after each, validating after the second."""
    checkpoint = ModelCheckpoint(path / "checkpoints", filename="{epoch}", save_top_k=-1, save_on_train_epoch_end=True)
    callback = RunReport(str(path / "demo"))
    trainer = make_trainer(path, [callback, checkpoint], enable_checkpointing=True, **settings)
    trainer.fit(LoggingModule(fail_in), datamodule=RolloutLoop(make_rollouts), ckpt_path=ckpt_path)
    return callback


def test_summary_holds_the_run_and_the_files_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PL_GLOBAL_SEED", "7")
    tmp_path /= "my run"
    fit(tmp_path, logger=[CSVLogger(tmp_path, name="csv"), TensorBoardLogger(tmp_path, name="tensorboard")])
    summary = read_summary(tmp_path / "demo")
    assert 0 < summary.pop("seconds") < 300
    assert summary == {
        "seed": 7,
        "iterations": 3,
        "held_out_accuracy_before": pytest.approx(0.2),
        "held_out_accuracy_after": pytest.approx(0.2),
        "held_out_accuracy_after_iteration": 2,
        "reward_mean": pytest.approx(0.3),
        "length_p50": 60.0,
        "length_p99": pytest.approx(295.2),
        "length_max": 300.0,
        "interrupted": False,
    }
    lines = [line for line in capsys.readouterr().out.splitlines()[1:] if "metrics" not in line]
    printed = dict(line.split(maxsplit=1) for line in lines if not line.startswith("  to "))
    assert [line.split(str(tmp_path))[0] for line in lines if line.startswith("  to ")] == [
        "  to go on    L.Trainer(max_epochs=<more>, ...).fit(module, data, ckpt_path='",
        "  to serve    python -m tlt_lightning export --ckpt_path '",
    ]
    checkpoint, held = printed["checkpoint"].split(" (")
    printed["checkpoint"] = checkpoint
    assert held == "after 3 iterations)"
    assert set(printed) == {"checkpoint", "summary", "report"}
    assert all(Path(path).is_file() for path in printed.values())


def test_metric_directories_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(tmp_path, logger=[CSVLogger(tmp_path, name="csv"), TensorBoardLogger(tmp_path, name="tensorboard")])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    dirs = [words[1] for words in lines if words[0] == "metrics"]
    assert dirs == [str(tmp_path / name / "version_0") for name in ("csv", "tensorboard")]
    assert all(Path(path).is_dir() for path in dirs)


def test_what_was_not_measured_is_null(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    fit(tmp_path, limit_val_batches=0)
    summary = read_summary(tmp_path / "demo")
    missing = {name for name, value in summary.items() if value is None}
    after = {"held_out_accuracy_after", "held_out_accuracy_after_iteration"}
    assert missing == {"seed", "held_out_accuracy_before", *after}


def test_accuracy_before_is_null_if_only_some_held_out_prompts_were_seen(tmp_path: Path) -> None:
    fit(tmp_path, num_sanity_val_steps=1)
    assert read_summary(tmp_path / "demo")["held_out_accuracy_before"] is None


def test_interrupted_run_has_a_report(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="made to fail"):
        fit(tmp_path, fail_in=3)
    summary = read_summary(tmp_path / "demo")
    assert summary["interrupted"] is True
    assert summary["iterations"] == 2
    page = read_page(tmp_path / "demo")
    assert page["state"] == "interrupted by RuntimeError"
    assert page["iterations"] == [1, 2]


@pytest.mark.parametrize("hook", ["on_sanity_check_start", "on_train_epoch_start", "on_train_batch_end"])
def test_ctrl_c_before_an_iteration_has_ended_says_that_nothing_is_saved(
    hook: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    trainer = make_trainer(tmp_path, [RunReport(str(tmp_path / "demo")), LambdaCallback(**{hook: interrupt})])
    with pytest.raises(SystemExit):
        trainer.fit(LoggingModule(None), datamodule=RolloutLoop(make_rollouts))
    assert "run interrupted before an iteration ended: nothing is saved" in capsys.readouterr().out
    assert not (tmp_path / "demo").exists()


def test_run_that_failed_before_its_first_iteration_leaves_an_earlier_report_alone(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="made to fail"):
        fit(tmp_path, fail_in=1)
    assert not (tmp_path / "demo").exists()


def test_the_report_of_an_earlier_run_is_kept_by_one_that_does_not_go_on_from_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fit(tmp_path)
    fit(tmp_path, ckpt_path=tmp_path / "checkpoints" / "epoch=0.ckpt")
    assert sorted(path.name for path in (tmp_path / "demo").iterdir()) == ["report.html", "summary.json"]
    assert "earlier run" not in caplog.text
    first = [read_summary(tmp_path / "demo")["seconds"]]
    fit(tmp_path, max_epochs=2)
    assert "held the report of an earlier run, kept in earlier_0" in caplog.text
    fit(tmp_path, max_epochs=1)
    kept = [json.loads((tmp_path / f"demo/earlier_{number}/summary.json").read_text()) for number in (0, 1)]
    assert [kept[0]["seconds"]] == first
    assert [each["iterations"] for each in (*kept, read_summary(tmp_path / "demo"))] == [3, 2, 1]
    names = ["earlier_0", "earlier_1", "report.html", "summary.json"]
    assert sorted(path.name for path in (tmp_path / "demo").iterdir()) == names
    (tmp_path / "demo" / "summary.json").unlink()  # as a run leaves it that is killed
    for number in (2, 3):
        fit(tmp_path, max_epochs=1)
        assert (tmp_path / f"demo/earlier_{number}/report.html").is_file()
        assert (tmp_path / f"demo/earlier_{number}/summary.json").is_file() is (number == 3)


def test_a_failing_report_does_not_hide_what_ended_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(run_report, "summarize")
    with pytest.raises(RuntimeError, match="made to fail"):
        fit(tmp_path, fail_in=2)
    assert "could not be written" in caplog.text


def test_a_run_outlives_a_page_that_cannot_be_written_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "demo" / "report.html").mkdir(parents=True)
    fit(tmp_path)
    assert caplog.text.count("report.html cannot be written, what it shows may be old") == 4
    printed = capsys.readouterr().out
    assert "report.html" not in printed
    assert not [*(tmp_path / "demo").glob(".*.part")]  # which would take room on a full disk
    assert read_summary(tmp_path / "demo")["iterations"] == 3


def test_a_run_that_has_finished_outlives_a_summary_that_cannot_be_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "demo" / "summary.json" / "mine").mkdir(parents=True)
    fit(tmp_path)
    assert "summary.json cannot be written" in caplog.text
    printed = capsys.readouterr().out
    assert "run finished after 3 iterations" in printed
    assert "checkpoint " in printed
    assert "summary.json" not in printed


def test_the_page_is_there_while_the_run_goes_on(tmp_path: Path) -> None:
    pages: list[dict[str, Any]] = []

    class Reader(L.Callback):
        def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            if trainer.current_epoch:
                pages.append(read_page(tmp_path / "demo"))

    steps = [progress(waiting=2 - i, running=1, finished=i, tokens=10 * i, elapsed=0.5 + i) for i in range(3)]
    report = RunReport(str(tmp_path / "demo"), num_completions=2)
    trainer = make_trainer(tmp_path, [report, Reader()])
    trainer.fit(LoggingModule(), datamodule=RolloutLoop(make_rollouts, steps))
    last = read_page(tmp_path / "demo")
    assert [(page["state"], page["iterations"]) for page in (*pages, last)] == [
        ("running", [1]),
        ("running", [1, 2]),
        ("finished", [1, 2, 3]),
    ]
    assert last["before"] == pytest.approx(0.2)
    assert last["metrics"]["reward/mean"] == pytest.approx([0.1, 0.2, 0.3])
    assert last["metrics"]["val/accuracy"] == [None, pytest.approx(0.2), None]
    detail = last["details"]["2"]
    assert detail["timeline"]["seconds"] == 2.5
    assert detail["ranks"] == [[["sync", 0.5], ["rollout", 2.0], ["update", 1.0]]]
    assert len(detail["completions"]) == 2
    assert {"policy", "objective"}.isdisjoint(last["facts"])  # the module of this test has neither
    assert "torch" in last["facts"]["versions"]


def test_pages_of_a_long_run_take_no_more_time_an_iteration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report, shown = RunReport(str(tmp_path)), list[int]()
    monkeypatch.setattr(report, "_write_page", lambda trainer, state: shown.append(len(report.history)))
    trainer: Any = SimpleNamespace(fast_dev_run=False, is_global_zero=True)
    module: Any = SimpleNamespace(iteration_log=SimpleNamespace(laps_by_rank=[], by_rank=[], laps_by_engine={}))
    for iteration in range(1, 5001):
        report.on_iteration_end(trainer, module, iteration, {"reward/mean": 0.5})
        assert sum(shown) <= 500 * iteration
    assert shown[:500] == [*range(1, 501)]
    assert max(after - before for before, after in pairwise(shown)) < 20


def test_failing_validation_alone_writes_no_report(tmp_path: Path) -> None:
    def fail(iteration: int) -> list[Any]:
        raise RuntimeError("engine died")

    callback = RunReport(str(tmp_path / "demo"))
    callback.history = {1: {"reward/mean": 0.5}}
    with pytest.raises(RuntimeError, match="engine died"):
        make_trainer(tmp_path, [callback]).validate(LoggingModule(), datamodule=RolloutLoop(fail), verbose=False)
    assert not (tmp_path / "demo").exists()


def test_resumed_run_reports_from_its_beginning(tmp_path: Path) -> None:
    whole = fit(tmp_path / "whole")
    with pytest.raises(RuntimeError, match="made to fail"):
        fit(tmp_path / "killed", fail_in=3)
    resumed = fit(tmp_path / "resumed", ckpt_path=tmp_path / "killed" / "checkpoints" / "epoch=1.ckpt")
    assert resumed.history == whole.history
    assert resumed.details == whole.details
    assert read_page(tmp_path / "resumed" / "demo")["metrics"] == read_page(tmp_path / "whole" / "demo")["metrics"]
    assert set(resumed.history) == {1, 2, 3}
    assert resumed.accuracy_before == pytest.approx(0.2)
    assert read_summary(tmp_path / "resumed" / "demo")["iterations"] == 3


def test_a_page_rounds_no_number_of_earlier_pages_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, numbers, in_five_digits = fit(tmp_path / "whole"), list[Any](), report_page.in_five_digits
    monkeypatch.setattr(report_page, "in_five_digits", lambda value: numbers.append(value) or in_five_digits(value))
    fit(tmp_path / "again", ckpt_path=tmp_path / "whole" / "checkpoints" / "epoch=0.ckpt")
    assert len(numbers) == sum(map(len, whole.history.values()))


def test_a_callback_that_has_reported_a_run_reports_the_next_one(tmp_path: Path) -> None:
    callback, folder = RunReport(str(tmp_path / "demo")), tmp_path / "demo"

    def fit(trainer: L.Trainer) -> dict[str, Any]:
        trainer.fit(LoggingModule(), datamodule=RolloutLoop(make_rollouts))
        return read_summary(folder)

    assert fit(make_trainer(tmp_path, [callback], max_epochs=3))["held_out_accuracy_before"] == pytest.approx(0.2)
    callback._started -= 1000  # pass before the next run
    trainer = make_trainer(tmp_path, [callback], max_epochs=1, num_sanity_val_steps=0)
    second = fit(trainer)
    assert (second["iterations"], second["held_out_accuracy_before"]) == (1, None)
    assert second["seconds"] < 300
    assert read_page(folder)["iterations"] == [1]
    assert read_summary(folder / "earlier_0")["iterations"] == 3
    trainer.fit_loop.max_epochs = 2
    assert fit(trainer)["iterations"] == 2
    assert read_page(folder)["iterations"] == [1, 2]
    trainer.save_checkpoint(tmp_path / "second.ckpt")
    resumed = make_trainer(tmp_path, [callback], max_epochs=3)
    resumed.fit(LoggingModule(), datamodule=RolloutLoop(make_rollouts), ckpt_path=tmp_path / "second.ckpt")
    resumed.fit_loop.max_epochs = 4
    assert fit(resumed)["iterations"] == 4
    assert read_page(folder)["iterations"] == [1, 2, 3, 4]
    assert not (folder / "earlier_1").exists()


def test_seconds_before_a_resume_count(tmp_path: Path) -> None:
    callback = RunReport(str(tmp_path))
    callback.load_state_dict({"history": {}, "details": {}, "accuracy_before": None, "seconds": 1000.0})
    assert 1000.0 < callback.state_dict()["seconds"] < 1100.0


def test_checkpoint_holds_the_iteration_it_was_saved_after_as_primitives(tmp_path: Path) -> None:
    fit(tmp_path)
    checkpoint = torch.load(tmp_path / "checkpoints" / "epoch=1.ckpt", weights_only=True)
    history = checkpoint["callbacks"]["RunReport"]["history"]
    assert history[2]["reward/mean"] == pytest.approx(0.2)
    assert history[2]["val/accuracy"] == pytest.approx(0.2)
    assert "val/accuracy" not in history[1]


def test_summary_of_nothing_is_null() -> None:
    summary = summarize({}, None)
    assert summary.pop("iterations") == 0
    assert set(summary.values()) == {None}


def test_report_survives_metrics_that_were_never_logged(tmp_path: Path) -> None:
    class Silent(LoggingModule):
        def on_train_epoch_end(self) -> None:
            pass

    trainer: L.Trainer = make_trainer(tmp_path, [RunReport(str(tmp_path / "demo"))], limit_val_batches=0)
    trainer.fit(Silent(), datamodule=RolloutLoop(make_rollouts))
    assert read_summary(tmp_path / "demo")["length_max"] is None


def test_a_run_of_one_iteration_is_said_so_and_its_checkpoint_as_seen_from_here(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    fit(tmp_path, max_epochs=1)
    said = "run finished after 1 iteration\n  checkpoint  checkpoints/epoch=0.ckpt (after 1 iteration)\n"
    assert said in capsys.readouterr().out


def test_hardware_is_named_where_there_is_no_proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_facts, "_CPU_INFO", tmp_path / "cpuinfo")  # as on macOS
    hardware = run_facts.facts(make_trainer(tmp_path, []), LoggingModule())["hardware"]
    assert hardware == f"{platform.machine()}, {os.cpu_count()} cores, 1 rank"


def test_a_run_of_the_command_line_goes_on_by_the_command_that_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = ["fit", "--ckpt_path=old.ckpt", "-c", "my recipe.yaml", "--trainer.max_epochs", "9", "--ckpt_path", "x"]
    monkeypatch.setattr("sys.argv", ["tlt-lightning", *given])
    saves_config = SaveConfigCallback(LightningArgumentParser(), Namespace())
    trainer = L.Trainer(callbacks=[saves_config], logger=False, accelerator="cpu", default_root_dir=tmp_path)
    command, path = "python -m tlt_lightning fit -c 'my recipe.yaml'", "last.ckpt"
    again = {is_over: run_report._again(trainer, path, is_over=is_over) for is_over in (False, True)}
    assert again[False] == f"{command} --trainer.max_epochs 9 --ckpt_path {path}"
    assert again[True] == f"{command} --ckpt_path {path} --trainer.max_epochs <more>"
