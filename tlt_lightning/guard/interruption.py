"""End a run on Ctrl-C where a checkpoint can be written, and at once on a second one."""

import signal
import sys
import threading
from collections.abc import Sequence
from types import FrameType
from typing import Any

from tlt_lightning.ranks.liveness import Liveness

NOTE = "\nEnding at the next engine or optimizer step; Ctrl-C again ends at once."


class Interruption:
    """Takes Ctrl-C during training, when an exception could come amid an optimizer step and leave half of it.

    A handler that somebody else has set stays. In other threads than the main one, where Python allows no handlers,
    nothing is done.

    Args:
        liveness: Raises KeyboardInterrupt at the next step.
    """

    def __init__(self, liveness: Liveness) -> None:
        self._liveness = liveness

    def listen(self) -> None:
        """Take the next Ctrl-C."""
        self._replace([signal.default_int_handler], self._handle)

    def give_back(self) -> None:
        """Let a Ctrl-C raise KeyboardInterrupt at once, also where Lightning lets none do anything."""
        self._replace([self._handle, signal.SIG_IGN], signal.default_int_handler)

    def _replace(self, known: Sequence[Any], handler: Any) -> None:
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) in known:
            signal.signal(signal.SIGINT, handler)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        self._liveness.interrupt()
        self.give_back()
        # In a thread, as `print` may be under way in this one; to what puts it above a bar that is being drawn.
        threading.Thread(target=print, args=(NOTE,), kwargs={"file": sys.stderr}, daemon=True).start()
