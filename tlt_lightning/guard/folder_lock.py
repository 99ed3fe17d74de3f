"""Keep two runs from writing their checkpoints into the same folder."""

import errno
import fcntl
import logging
import os
import socket
from pathlib import Path
from typing import IO

from lightning.pytorch.utilities.exceptions import MisconfigurationException

log = logging.getLogger(__name__)


class FolderLock:
    """Locks a folder by a locked file beside it, which names the owner's process and host.

    The operating system's lock ends with its process; what a killed owner left in the file is only a note.

    Args:
        folder: Holds checkpoints and nothing else: the lock file is `.<name>.lock` next to it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder.with_name(f".{folder.name}.lock")
        self._file: IO[str] | None = None

    def take(self) -> None:
        """Take the lock, or raise MisconfigurationException naming who holds it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        file = open(self.path, "a+")  # noqa: SIM115 - open as long as it is locked
        file.seek(0)
        owner = file.read().strip()
        try:
            # Not `flock`: that would live on in a child of this process, for example of a reward, after its death.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.close()
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                log.warning("%s cannot be locked (%s): start no second run in this folder.", self.path, error)
                return
            raise MisconfigurationException(
                f"Another run ({owner or 'of an unknown process'}) writes its checkpoints to {str(self.folder)!r}, and "
                "each would overwrite the other's. Wait for it, or give this run a folder of its own, for example "
                "`--trainer.default_root_dir outputs/second`."
            ) from error
        if owner:
            log.warning("The last run in %s was killed (%s). Its checkpoints are fine; going on.", self.folder, owner)
        self._file = file
        self._write(f"process {os.getpid()} on {socket.gethostname()}\n")

    def release(self) -> None:
        """Give the lock back; safe to call twice."""
        if self._file is not None:
            self._write("")
            self._file.close()
            self._file = None

    def _write(self, owner: str) -> None:
        assert self._file is not None
        self._file.truncate(0)
        self._file.write(owner)
        self._file.flush()
