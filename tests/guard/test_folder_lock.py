import logging
import multiprocessing
import os
import re
import signal
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from tlt_lightning.guard.folder_lock import FolderLock

CONTEXT = multiprocessing.get_context("fork")


def hold(folder: Path, ready: Connection) -> None:
    lock = FolderLock(folder)
    lock.take()
    ready.send(os.getpid())
    signal.pause()


def test_a_folder_belongs_to_one_process_until_that_ends(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    here, there = CONTEXT.Pipe()
    owner = CONTEXT.Process(target=hold, args=(tmp_path / "checkpoints", there), daemon=True)
    owner.start()
    pid = here.recv()
    lock = FolderLock(tmp_path / "checkpoints")
    message = f"Another run (process {pid} on "
    with pytest.raises(MisconfigurationException, match=re.escape(message) + r".*--trainer.default_root_dir"):
        lock.take()
    FolderLock(tmp_path / "other").take()
    owner.kill()
    owner.join()
    with caplog.at_level(logging.WARNING):
        lock.take()
    assert f"The last run in {tmp_path}/checkpoints was killed (process {pid} on " in caplog.text
    lock.release()


def test_a_folder_left_in_order_is_taken_without_a_word(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        lock = FolderLock(tmp_path / "checkpoints")
        lock.take()
        lock.release()
    assert not caplog.text


def test_a_child_that_outlives_the_run_does_not_keep_the_folder(tmp_path: Path) -> None:
    here, there = CONTEXT.Pipe()
    lock = FolderLock(tmp_path / "checkpoints")
    lock.take()
    child = CONTEXT.Process(target=signal.pause, daemon=True)
    child.start()
    lock.release()
    owner = CONTEXT.Process(target=hold, args=(tmp_path / "checkpoints", there), daemon=True)
    owner.start()
    assert here.poll(5)
    for process in (child, owner):
        process.kill()
        process.join()
