"""End a run on Ctrl-C where a checkpoint can be written, and at once on a second one."""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import FrameType

from tlt_lightning.data.liveness import Liveness

NOTE = "\nEnding at the next engine or optimizer step, to write a checkpoint; Ctrl-C again ends at once.\n"


class Interruption:
    """Takes Ctrl-C during training, when an exception could come amid an optimizer step and leave half of it.

    A handler that somebody else has set stays, and so does every other thread's run, where Python allows none.

    Args:
        liveness: Raises KeyboardInterrupt at the next step.
    """

    def __init__(self, liveness: Liveness) -> None:
        self._liveness = liveness

    def listen(self) -> None:
        """Take the next Ctrl-C."""
        if threading.current_thread() is threading.main_thread() and self._is_pythons:
            signal.signal(signal.SIGINT, self._handle)

    def give_back(self) -> None:
        """Let a Ctrl-C raise KeyboardInterrupt at once, also where Lightning lets none do anything."""
        if threading.current_thread() is threading.main_thread() and (self._is_own or self._is_ignored):
            signal.signal(signal.SIGINT, signal.default_int_handler)

    @property
    def _is_pythons(self) -> bool:
        return signal.getsignal(signal.SIGINT) is signal.default_int_handler

    @property
    def _is_own(self) -> bool:
        return signal.getsignal(signal.SIGINT) == self._handle

    @property
    def _is_ignored(self) -> bool:
        return signal.getsignal(signal.SIGINT) == signal.SIG_IGN

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        self._liveness.interrupt()
        self.give_back()
        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, NOTE.encode())  # `print` may be under way
