"""Keep large files out of the way until their process ends, however it ends."""

from __future__ import annotations

import fcntl
import logging
import shutil
import tempfile
from pathlib import Path
from typing import IO

log = logging.getLogger(__name__)

_OWNER = "owner"  # locked by the process that uses the folder


class TemporaryFolder:
    """Makes a temporary folder that is removed with this object, or by the next one if its process is killed.

    The operating system ends a lock with its process. Not `lockf`: it would let a process remove its own folders.

    Args:
        prefix: First letters of its name; folders with the same that nobody uses any more are removed.
    """

    def __init__(self, prefix: str) -> None:
        for earlier in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
            _remove_if_left(earlier)
        self._folder = tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True)
        self.path = Path(self._folder.name)
        self._owner = _lock(self.path)


def _lock(folder: Path) -> IO[str]:
    file = open(folder / f"{_OWNER}.new", "w")  # noqa: SIM115 - open as long as it is locked
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        (folder / f"{_OWNER}.new").rename(folder / _OWNER)  # nobody sees it unlocked
    except OSError as error:
        log.warning("%s cannot be locked (%s): if this process is killed, remove it yourself.", folder, error)
    return file


def _remove_if_left(folder: Path) -> None:
    try:
        with open(folder / _OWNER) as owner:
            fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder)
    except OSError:  # in use, another user's, removed by another process
        return
    log.info("Removed %s, which a killed process had left.", folder)
