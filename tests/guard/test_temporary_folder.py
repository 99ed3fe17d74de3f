import gc
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tlt_lightning.guard.temporary_folder import TemporaryFolder

USE_ONE = """
import signal
from tlt_lightning.guard.temporary_folder import TemporaryFolder
folder = TemporaryFolder("weights-")
(folder.path / "model").write_text("large")
print(folder.path, flush=True)
signal.pause()
"""


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))


def test_what_a_killed_process_left_is_removed_by_the_next(tmp_path: Path) -> None:
    (tmp_path / "weights-of-somebody").mkdir()
    (tmp_path / "other").mkdir()
    with subprocess.Popen([sys.executable, "-c", USE_ONE], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        theirs = Path(process.stdout.readline().strip())
        mine = TemporaryFolder("weights-")
        held = theirs.parent == tmp_path and (theirs / "model").exists()
        process.kill()
    assert held
    assert theirs.exists()
    second = TemporaryFolder("weights-")
    assert not theirs.exists()
    names = {"weights-of-somebody", "other", mine.path.name, second.path.name}  # what has no owner is nobody's to judge
    assert {path.name for path in tmp_path.iterdir()} == names


def test_a_folder_goes_with_its_object(tmp_path: Path) -> None:
    folder = TemporaryFolder("weights-")
    assert folder.path.parent == tmp_path
    del folder
    gc.collect()
    assert list(tmp_path.iterdir()) == []
