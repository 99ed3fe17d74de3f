import shutil
import time
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.support.rollout_loop import LoggingModule, RolloutLoop, make_rollout, make_trainer
from tlt_lightning.callbacks.iteration_checkpoint import IterationCheckpoint
from tlt_lightning.guard.callback import RunGuard
from tlt_lightning.hooks import RolloutCallback


class Clock(RolloutCallback):
    """Lets an iteration take four minutes, and notes the checkpoints that are there when the run has ended."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, stop_after: int) -> None:
        self.now, self.stop_after = 1000.0, stop_after
        monkeypatch.setattr(time, "monotonic", lambda: self.now)

    def on_iteration_end(self, trainer, pl_module, iteration, metrics):  # type: ignore[no-untyped-def]
        self.now += 240
        trainer.should_stop = iteration == self.stop_after


@pytest.mark.parametrize(
    ("every_minutes", "stop_after", "saved"),
    [(10.0, 0, [0, 3, 6, 7]), (8.0, 0, [0, 2, 4, 6, 7]), (10.0, 3, [0, 2]), (0.0, 0, list(range(8)))],
)
def test_it_saves_when_time_has_passed_and_at_the_end(
    every_minutes: float, stop_after: int, saved: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = IterationCheckpoint(str(tmp_path / "all"), every_minutes, keep=100)
    callbacks = [RunGuard(), Clock(monkeypatch, stop_after), checkpoints]
    trainer = make_trainer(tmp_path, callbacks, max_epochs=8, enable_checkpointing=True, limit_val_batches=0)
    trainer.fit(LoggingModule(), RolloutLoop(lambda _: [make_rollout(1.0)]))
    names = sorted(path.name for path in (tmp_path / "all").iterdir())
    assert names == [*(f"epoch={epoch}.ckpt" for epoch in saved), "last.ckpt"]
    assert (tmp_path / "all" / "last.ckpt").resolve().name == f"epoch={saved[-1]}.ckpt"


def test_it_saves_where_max_steps_ends_the_run(tmp_path: Path) -> None:
    checkpoints = IterationCheckpoint(str(tmp_path / "all"), keep=100)
    settings = {"max_epochs": -1, "max_steps": 3, "enable_checkpointing": True, "limit_val_batches": 0}
    trainer = make_trainer(tmp_path, [RunGuard(), checkpoints], **settings)
    trainer.fit(LoggingModule(), RolloutLoop(lambda _: [make_rollout(1.0)]))
    assert trainer.global_step == 3
    assert torch.load(tmp_path / "all" / "last.ckpt", weights_only=True)["global_step"] == 3


def test_the_latest_are_kept(tmp_path: Path) -> None:
    checkpoints = IterationCheckpoint(str(tmp_path / "kept"), every_minutes=0.0, keep=2)
    trainer = make_trainer(tmp_path, [RunGuard(), checkpoints], enable_checkpointing=True, limit_val_batches=0)
    trainer.fit(LoggingModule(), RolloutLoop(lambda _: [make_rollout(1.0)]))
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == ["epoch=1.ckpt", "epoch=2.ckpt", "last.ckpt"]


def fit_into(folder: Path, max_epochs: int, keep: int = 2, saver: L.Callback | None = None, **fit: Path) -> None:
    saver = saver or IterationCheckpoint(str(folder), every_minutes=0.0, keep=keep)
    trainer = make_trainer(
        folder, [RunGuard(), saver], max_epochs=max_epochs, enable_checkpointing=True, limit_val_batches=0
    )
    trainer.fit(LoggingModule(), RolloutLoop(lambda _: [make_rollout(1.0)]), weights_only=True, **fit)


@pytest.mark.parametrize(("max_epochs", "keep"), [(5, 1), (8, 1), (8, 3), (8, 5)])
def test_a_resumed_run_keeps_as_many_as_it_is_told_to(max_epochs: int, keep: int, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    fit_into(folder, 4, 3)
    fit_into(folder, max_epochs, keep, ckpt_path=folder / "last.ckpt")
    kept = [f"epoch={epoch}.ckpt" for epoch in range(max_epochs - keep, max_epochs)]
    assert sorted(path.name for path in folder.iterdir()) == [*kept, "last.ckpt"]
    assert (folder / "last.ckpt").resolve().name == kept[-1]


@pytest.mark.parametrize(
    ("metric", "mode", "kept"),
    [("step", "min", 0), ("step", "max", 5), ("reward/mean", "min", 0), ("reward/mean", "max", 0)],  # which is constant
)
def test_a_resumed_run_keeps_as_many_of_the_best_as_it_is_told_to(
    metric: str, mode: str, kept: int, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"monitor": metric, "mode": mode, "save_last": "link", "save_on_train_epoch_end": True}
    for max_epochs, top in ((4, 3), (5, 1), (6, 1)):  # in the second `last.ckpt` still needs one more
        best, last = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=top, **settings), tmp_path / "last.ckpt"
        fit_into(tmp_path, max_epochs, saver=best, **({"ckpt_path": last} if last.exists() else {}))
        assert Path(best.best_model_path).exists()
    assert [path.name for path in tmp_path.glob("epoch*")] == [f"epoch={kept}.ckpt"]


def test_another_runs_checkpoints_are_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "checkpoints"
    fit_into(folder, 3)
    (folder / "notes.txt").touch()
    fit_into(folder, 4, ckpt_path=folder / "last.ckpt")  # the same run
    assert sorted(path.name for path in folder.iterdir()) == ["epoch=2.ckpt", "epoch=3.ckpt", "last.ckpt", "notes.txt"]
    shutil.copy(folder / "last.ckpt", tmp_path / "hpc_ckpt_1.ckpt")  # as SLURM's requeue leaves it
    fit_into(folder, 5, ckpt_path=tmp_path / "hpc_ckpt_1.ckpt")
    assert sorted(path.name for path in folder.iterdir()) == ["epoch=3.ckpt", "epoch=4.ckpt", "last.ckpt", "notes.txt"]
    assert "earlier run" not in caplog.text
    parts = folder / "epoch=4.ckpt.ranks"
    parts.mkdir()
    model = (folder / "last.ckpt").read_bytes()
    fit_into(folder, 4)
    saved = ["epoch=2.ckpt", "epoch=3.ckpt", "last.ckpt"]
    assert sorted(path.name for path in folder.iterdir()) == ["earlier_0", *saved, "notes.txt"]
    kept = sorted(path.name for path in (folder / "earlier_0").iterdir())
    assert kept == ["epoch=3.ckpt", "epoch=4.ckpt", "epoch=4.ckpt.ranks", "last.ckpt"]
    assert (folder / "earlier_0" / "last.ckpt").read_bytes() == model
    assert "held checkpoints of an earlier run, kept in earlier_0" in caplog.text
    fit_into(folder, 6, ckpt_path=folder / "earlier_0" / "last.ckpt")
    assert sorted(path.name for path in folder.glob("*.ckpt")) == ["epoch=5.ckpt", "last.ckpt"]
    assert sorted(path.name for path in (folder / "earlier_0").iterdir()) == kept
    assert sorted(path.name for path in (folder / "earlier_1").iterdir()) == [
        "epoch=2.ckpt",
        "epoch=3.ckpt",
        "last.ckpt",
    ]


def test_a_callback_that_has_saved_a_run_saves_the_next_one(tmp_path: Path) -> None:
    folder, checkpoints = tmp_path / "all", IterationCheckpoint(str(tmp_path / "all"), keep=1)

    def fit(trainer: L.Trainer, **fit: Path) -> list[str]:
        trainer.fit(LoggingModule(), RolloutLoop(lambda _: [make_rollout(1.0)]), weights_only=True, **fit)
        return sorted(path.name for path in folder.iterdir())

    def trainer(max_epochs: int) -> L.Trainer:
        settings = {"max_epochs": max_epochs, "enable_checkpointing": True, "limit_val_batches": 0}
        return make_trainer(tmp_path, [RunGuard(), checkpoints], **settings)

    assert fit(trainer(3)) == ["epoch=2.ckpt", "last.ckpt"]
    second = trainer(1)
    assert fit(second) == ["earlier_0", "epoch=0.ckpt", "last.ckpt"]
    assert checkpoints.best_model_path == str(folder / "epoch=0.ckpt")
    assert (folder / "last.ckpt").resolve().name == "epoch=0.ckpt"
    second.fit_loop.max_epochs = 2
    assert fit(second) == ["earlier_0", "epoch=1.ckpt", "last.ckpt"]
    shutil.copy(folder / "epoch=1.ckpt", tmp_path / "other.ckpt")
    resumed = trainer(3)
    assert fit(resumed, ckpt_path=folder / "last.ckpt") == ["earlier_0", "epoch=2.ckpt", "last.ckpt"]
    resumed.fit_loop.max_epochs = 4
    assert fit(resumed) == ["earlier_0", "epoch=3.ckpt", "last.ckpt"]
    checkpoints.every_minutes = 0.0
    resumed.fit_loop.max_epochs = 3
    assert fit(resumed, ckpt_path=tmp_path / "other.ckpt") == ["earlier_0", "earlier_1", "epoch=2.ckpt", "last.ckpt"]
    assert fit(trainer(3), ckpt_path=tmp_path / "other.ckpt")[:3] == ["earlier_0", "earlier_1", "earlier_2"]
    assert (folder / "last.ckpt").resolve().name == "epoch=2.ckpt"


def test_a_run_that_goes_on_from_another_folder_keeps_what_is_in_its_own(tmp_path: Path) -> None:
    fit_into(tmp_path / "first", 2)
    fit_into(tmp_path / "second", 3)
    with pytest.warns(UserWarning, match="dirpath has changed"):
        fit_into(tmp_path / "second", 3, ckpt_path=tmp_path / "first" / "last.ckpt")
    assert (tmp_path / "second" / "earlier_0" / "epoch=2.ckpt").is_file()


def test_what_another_callback_has_saved_in_this_run_stays(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    best = ModelCheckpoint(tmp_path / "all", "best-{step}", every_n_train_steps=2)
    callbacks = [RunGuard(), best, IterationCheckpoint(str(tmp_path / "all"), every_minutes=0.0)]
    trainer = make_trainer(tmp_path, callbacks, max_epochs=1, enable_checkpointing=True, limit_val_batches=0)
    trainer.fit(LoggingModule(), RolloutLoop(lambda _: [make_rollout(1.0)]))
    assert Path(best.best_model_path).is_file()
    assert "earlier run" not in caplog.text


def die_amid_the_moves(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run into a folder whose files another run wrote, and be killed once one of them has been moved."""
    rename, moved = Path.rename, []

    def die_after_the_first(path: Path, target: Path) -> Path:
        if moved:
            raise KeyboardInterrupt
        moved.append(target)
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", die_after_the_first)
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        fit_into(folder, 1)
    monkeypatch.undo()


def test_a_kill_amid_the_moves_leaves_no_parts_to_be_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "checkpoints"
    fit_into(folder, 1)
    (folder / "epoch=0.ckpt.ranks").mkdir()
    die_amid_the_moves(folder, monkeypatch)
    fit_into(folder, 1)
    assert [path.name for path in tmp_path.rglob("*.ranks")] == ["epoch=0.ckpt.ranks"]


def test_moves_that_a_kill_cut_off_are_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "checkpoints"
    fit_into(folder, 1)
    die_amid_the_moves(folder, monkeypatch)
    assert not (folder / "last.ckpt").is_symlink()  # rather than one without its file
    fit_into(folder, 1)
    assert (folder / "earlier_0" / "last.ckpt").exists()
    assert not (folder / "earlier_1").exists()
