import csv
import multiprocessing
import signal
import threading
from pathlib import Path

import pytest
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from tests.support.ranks.rank_processes import run_ranks
from tests.support.rollout_loop import LoggingModule, RolloutLoop, make_rollout, make_trainer
from tlt_lightning.guard.callback import RunGuard
from tlt_lightning.guard.checkpoint_io import WholeCheckpointIO
from tlt_lightning.guard.folder_lock import FolderLock
from tlt_lightning.hooks import RolloutCallback
from tlt_lightning.metrics import IterationLog

DIED = "The run cannot go on: rank 1 has died: its process ended without a word."
STOPPED = "The run cannot go on: rank 1 ended with SIGTERM."


@pytest.mark.slow
@pytest.mark.parametrize(
    ("signal_name", "ranks", "place", "statuses", "sentence"),
    [
        ("SIGTERM", "1", "rollout", [1, 143], STOPPED),
        ("SIGTERM", "1", "update", [1, 143], STOPPED),
        ("SIGTERM", "0,1", "rollout", [143, 143], None),
        ("SIGKILL", "1", "start", [1, -signal.SIGKILL], DIED),
        ("SIGINT", "0,1", "rollout", [1, 1], None),
        ("SIGKILL", "1", "update", [1, -signal.SIGKILL], DIED),
        ("SIGKILL", "1", "checkpoint", [1, -signal.SIGKILL], DIED),
        ("SIGKILL", "1", "stuck", [1, -signal.SIGKILL], DIED),
    ],
)
def test_the_end_of_a_rank_ends_all_with_a_failure_that_names_it(
    signal_name: str,
    ranks: str,
    place: str,
    statuses: list[int],
    sentence: str | None,
    policy_path: str,
    prompts_path: str,
    tmp_path: Path,
) -> None:
    arguments = (policy_path, prompts_path, str(tmp_path), signal_name, ranks, place)
    ended = run_ranks("tests.support.ranks.two_ranks_faults", tmp_path, *arguments)
    assert ended.statuses == statuses, ended.stderr[-3000:]
    assert sentence is None or sentence in ended.stderr
    assert (tmp_path / "on_exception.ckpt").exists() or place in ("start", "stuck")
    # Within an update of two steps a rank does not know what the others have yet to learn from.
    assert (tmp_path / "iterations/interrupted.ckpt").exists() == (place == "rollout") or ranks == "1"
    if (signal_name, place) == ("SIGTERM", "update"):  # all finish the update and save it
        assert (tmp_path / "iterations/epoch=1.ckpt").exists()


def fit(folder: Path) -> None:
    """Fit for three iterations in this process, with checkpoints."""
    callbacks = [RunGuard(), ModelCheckpoint(folder / "checkpoints", "{epoch}", save_on_train_epoch_end=True)]
    loggers = [CSVLogger(folder, "csv"), TensorBoardLogger(folder, "tensorboard")]
    trainer = make_trainer(folder, callbacks, logger=loggers, enable_checkpointing=True, limit_val_batches=0)
    trainer.fit(LoggingModule(), RolloutLoop(lambda _: [make_rollout(1.0)]))


def test_a_folder_in_which_another_run_writes_is_refused(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    taken = context.Event()

    def hold() -> None:
        lock = FolderLock(tmp_path / "checkpoints")
        lock.take()
        taken.set()
        signal.pause()

    owner = context.Process(target=hold, daemon=True)
    owner.start()
    assert taken.wait(100)
    with pytest.raises(MisconfigurationException, match=f"process {owner.pid} .* writes its checkpoints to"):
        fit(tmp_path)
    owner.kill()
    owner.join()
    fit(tmp_path)
    fit(tmp_path)  # and a run that has ended keeps nothing


class Ending(RolloutCallback):
    """Ends the run by an error while the first checkpoint is being written."""

    def __init__(self, write: threading.Event) -> None:
        self.write = write

    def on_train_epoch_start(self, trainer, pl_module):  # type: ignore[no-untyped-def]
        if trainer.current_epoch == 1:
            threading.Timer(0.5, self.write.set).start()
            raise KeyError("a fault of the user's")


def test_an_error_waits_for_the_checkpoint_that_is_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, save = threading.Event(), torch.save
    monkeypatch.setattr(torch, "save", lambda *arguments: write.wait(200) and save(*arguments))
    checkpoints = ModelCheckpoint(tmp_path, "{epoch}", save_last="link", save_on_train_epoch_end=True)
    callbacks = [Ending(write), RunGuard(), checkpoints]
    trainer = make_trainer(tmp_path, callbacks, enable_checkpointing=True, limit_val_batches=0)
    module = LoggingModule()
    module.iteration_log = IterationLog()  # type: ignore[assignment]
    with pytest.raises(KeyError, match="a fault of the user's"):
        trainer.fit(module, RolloutLoop(lambda _: [make_rollout(1.0)]))
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["epoch"] == 0
    assert module.iteration_log.seconds("checkpoint") > 0


def test_a_checkpoint_that_cannot_be_written_ends_the_run(tmp_path: Path) -> None:
    checkpoints = ModelCheckpoint(tmp_path, "{epoch}", save_last="link", save_on_train_epoch_end=True)
    checkpoints.file_exists = lambda *_: False  # type: ignore[method-assign]
    (tmp_path / "epoch=1.ckpt").mkdir()
    callbacks = [RunGuard(), checkpoints]
    trainer = make_trainer(tmp_path, callbacks, enable_checkpointing=True, limit_val_batches=0, max_epochs=9)
    with pytest.raises(RuntimeError, match=r"epoch=1.ckpt' could not be written"):
        trainer.fit(LoggingModule(), RolloutLoop(lambda _: [make_rollout(1.0)]))
    assert trainer.current_epoch <= 2  # at the next save if not before
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["epoch"] == 0


def test_a_trainer_with_a_checkpoint_plugin_keeps_it(tmp_path: Path) -> None:
    class Own(TorchCheckpointIO):
        """A user's."""

    for plugins, expected in (([Own()], Own), ([], WholeCheckpointIO)):
        trainer = make_trainer(tmp_path, [RunGuard()], plugins=plugins, max_epochs=1)
        trainer.fit(LoggingModule(), RolloutLoop(lambda _: [make_rollout(1.0)]))
        assert type(trainer.strategy.checkpoint_io) is expected


@pytest.mark.slow
def test_sigterm_ends_a_plain_script_with_143(policy_path: str, prompts_path: str, tmp_path: Path) -> None:
    arguments = (policy_path, prompts_path, str(tmp_path), "SIGTERM", "0", "rollout")
    ended = run_ranks("tests.support.ranks.two_ranks_faults", tmp_path, *arguments, num_ranks=1)
    assert ended.statuses == [143], ended.stderr[-3000:]


@pytest.mark.slow
def test_a_kill_in_a_checkpoint_leaves_no_gap_in_the_metrics(
    policy_path: str, prompts_path: str, tmp_path: Path
) -> None:
    arguments = (policy_path, prompts_path, str(tmp_path), "SIGKILL", "0", "checkpoint")
    ended = run_ranks("tests.support.ranks.two_ranks_faults", tmp_path, *arguments, num_ranks=1)
    assert ended.statuses == [-signal.SIGKILL], ended.stderr[-3000:]
    with open(tmp_path / "metrics.csv", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["reward/mean"]]
    assert [row["step"] for row in rows] == ["0", "1"]  # iteration 2 is in, whose checkpoint was being written


def test_two_callbacks_that_write_a_folder_differently_lock_it_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    callbacks = [RunGuard(), ModelCheckpoint(tmp_path / "all", "{epoch}"), OnExceptionCheckpoint("all")]
    trainer = make_trainer(tmp_path, callbacks, max_epochs=1, enable_checkpointing=True, limit_val_batches=0)
    trainer.fit(LoggingModule(), RolloutLoop(lambda _: [make_rollout(1.0)]))
    assert "An earlier run" not in caplog.text
