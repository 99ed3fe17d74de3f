"""Processes of benchmarks: one that hangs is ended, and says where."""

import faulthandler
import multiprocessing
import time
from pathlib import Path

from benchmarks.common.processes import end_process


def hang_here(path: Path) -> None:
    """Never return."""
    faulthandler.enable(path.open("w"))
    path.with_suffix(".ready").touch()
    time.sleep(600)


def test_a_process_that_hangs_is_ended_and_says_where(tmp_path: Path) -> None:
    stacks = tmp_path / "stacks"
    process = multiprocessing.get_context("spawn").Process(target=hang_here, args=(stacks,))
    process.start()
    while not stacks.with_suffix(".ready").exists() and process.is_alive():
        time.sleep(0.05)
    end_process(process, 0.0)
    assert process.exitcode
    assert "in hang_here" in stacks.read_text()
