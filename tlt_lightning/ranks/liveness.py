"""Notice that another rank has failed, died or stalled; end this one in order on SIGTERM and Ctrl-C."""

from __future__ import annotations

import atexit
import logging
import os
import selectors
import signal
import socket
import threading
import time
from contextlib import suppress
from datetime import timedelta
from math import inf

import lightning as L
from lightning.pytorch.utilities.exceptions import SIGTERMException

log = logging.getLogger(__name__)

SIGTERM_STATUS = 143  # 128 + 15, as a shell reports a process that SIGTERM has ended

_POLL_SECONDS = 0.1
_BEAT_SECONDS = 1.0
_SILENT_SECONDS = 50.0  # a rank that loads or compiles may keep its other threads from running for a while
_STALLED_SECONDS = 300.0
_NOTE_SECONDS = 5.0
_GRACE_SECONDS = 30.0
_TERM_SECONDS = 120.0  # an optimizer step may take as long before it looks for SIGTERM
_GOODBYE, _BEAT, _FAILURE, _SIGTERM = "goodbye", "beat", "failure", "sigterm"


class Liveness:
    """Watches the other ranks of a run over connections of its own, never by a collective.

    Each rank's thread gives a sign of life to rank 0 every second, which passes on what it learns. The operating
    system closes the end of a process that dies, so this is noticed at once; a dead machine or a stopped process after
    `_SILENT_SECONDS` of silence. The thread logs the reason, and `check`, called at each engine step and batch, raises
    it. A main thread that waits for the dead in a collective is ended after `_GRACE_SECONDS`, and so is a process that
    does not get through its exit.

    A rank may live without getting on, while others wait in idle windows, which have no time limit. Each tells how
    long ago its last `check` was: `_STALLED_SECONDS` warn, more than `DDPStrategy(timeout=...)` fails. So end ranks
    that all wait in collectives of an engine, which have no time limit. SIGTERM ends those `_TERM_SECONDS` later.

    Args:
        trainer: Its strategy tells the others where rank 0 listens; with one rank there is nobody to watch.
    """

    def __init__(self, trainer: L.Trainer) -> None:
        self.rank, self.world_size = trainer.global_rank, trainer.world_size
        self._patience = (getattr(trainer.strategy, "_timeout", None) or timedelta(minutes=30)).total_seconds()
        self._terminated = self._interrupted = False
        self._failure: str | None = None
        self._failed_at, self._has_told = 0.0, False
        self._last_check: float | None = None  # loading takes what it takes
        self.ends_itself = False
        """True once a `check` has ended this rank, at a step before which all of the last one is done."""
        self._outbox: list[str] = []
        self._closed = threading.Event()
        self._lines: dict[int, _Line] = {}
        self._thread: threading.Thread | None = None
        if self.world_size > 1:
            self._connect(trainer)
            self._thread = threading.Thread(target=self._watch, name="liveness", daemon=True)
            self._thread.start()

    @property
    def is_told_to_end(self) -> bool:
        """True after `terminate` or `interrupt`."""
        return self._terminated or self._interrupted

    def check(self, *, is_free: bool = True) -> None:
        """Raise RuntimeError if a rank has failed or died, and, where this one is free to end, a signal's exception.

        `is_free` is False where something must be finished first; a signal then waits for a later call.
        """
        self._last_check = time.monotonic()
        if is_free and self.is_told_to_end:
            self.ends_itself = True
            raise SIGTERMException(SIGTERM_STATUS) if self._terminated else KeyboardInterrupt
        if self._failure is not None:
            self.ends_itself = True
            raise RuntimeError(_sentence(self._failure))

    def terminate(self) -> None:
        """Make the next `check` that is free end this rank, which ends the others; safe in a signal handler."""
        self._terminated = True

    def interrupt(self) -> None:
        """Make the next `check` raise KeyboardInterrupt; safe in a signal handler."""
        self._interrupted = True

    def report(self, error: BaseException) -> None:
        """Tell the other ranks what ended this one, or note on `error` which other rank ended."""
        if self.world_size == 1:
            return
        self.ends_itself = True
        # Backends raise RuntimeErrors that name neither rank nor reason when the other end of a collective is gone.
        end = time.monotonic() + (_NOTE_SECONDS if isinstance(error, RuntimeError) else 0.0)
        while self._failure is None and time.monotonic() < end:
            time.sleep(_POLL_SECONDS)
        if self._failure is None:
            name = "SIGTERM" if self._terminated else f"{type(error).__name__}: {error}".replace("\n", " ")
            self._outbox.append(f"rank {self.rank} ended with {name}")
        elif self._failure not in str(error):
            error.add_note(_sentence(self._failure))

    def close(self) -> None:
        """Take leave of the other ranks, who miss one that ends without; safe to call twice."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()
        if self._failure is not None:
            # NCCL waits at exit for a rank that is stopped, without end and beyond the reach of Python's threads.
            atexit.register(signal.alarm, int(_GRACE_SECONDS))

    def _connect(self, trainer: L.Trainer) -> None:
        host = os.environ.get("MASTER_ADDR", "127.0.0.1")
        if self.rank == 0:
            dual = socket.has_dualstack_ipv6()
            family = socket.AF_INET6 if dual else socket.AF_INET
            with socket.create_server(("", 0), family=family, backlog=self.world_size, dualstack_ipv6=dual) as listener:
                trainer.strategy.broadcast(listener.getsockname()[1])
                listener.settimeout(_SILENT_SECONDS)
                for _ in range(1, self.world_size):
                    line = _Line(listener.accept()[0])
                    self._lines[line.rank] = line
        else:
            port = trainer.strategy.broadcast(0)
            self._lines[0] = _Line(socket.create_connection((host, port), timeout=_SILENT_SECONDS), of=0)
            self._lines[0].send("hello", str(self.rank))

    # The watching thread

    def _watch(self) -> None:
        last_beat, terminated_at = 0.0, inf
        with selectors.DefaultSelector() as selector:
            for line in self._lines.values():
                selector.register(line.socket, selectors.EVENT_READ, line)
            while not self._closed.is_set():
                for key, _ in selector.select(_POLL_SECONDS):
                    if not self._hear(key.data):
                        selector.unregister(key.fileobj)
                        del self._lines[key.data.rank]
                now = time.monotonic()
                if self._terminated and terminated_at == inf:
                    terminated_at = now
                    self._send(_SIGTERM)  # which others end by where this rank does: an update needs them all
                self._send_outbox()
                if now - last_beat > _BEAT_SECONDS:
                    last_beat = now
                    self._send(_BEAT, f"{self._stalled(now):.0f}")
                for line in self._lines.values():
                    self._judge(line, now)
                if self._failure is not None and not self.ends_itself and now - self._failed_at > _GRACE_SECONDS:
                    log.error("Rank %d waits for what never comes and is ended. %s", self.rank, self._failure)
                    os._exit(1)
                last_look = max(terminated_at, self._last_check or 0.0)
                if not self.ends_itself and now - last_look > _TERM_SECONDS:
                    log.error("Rank %d has not looked for SIGTERM in %.0f s and is ended.", self.rank, _TERM_SECONDS)
                    os._exit(SIGTERM_STATUS)
        self._send_outbox()
        self._send(_GOODBYE)
        for line in self._lines.values():
            line.socket.close()

    def _hear(self, line: _Line) -> bool:
        """Obey the lines that came in; return False once the other end is closed."""
        for kind, text in line.read():
            if kind == _GOODBYE:
                line.left = True
            elif kind == _FAILURE:
                self._fail(text, besides=line)
            elif kind == _SIGTERM:
                line.terminated = True
            else:
                line.stalled = float(text)
        if line.is_open:
            return True
        if not line.left:
            how = "ended with SIGTERM" if line.terminated else "has died: its process ended without a word"
            self._fail(f"rank {line.rank} {how}")
        return False

    def _judge(self, line: _Line, now: float) -> None:
        if line.left:
            return
        if now - line.heard > _SILENT_SECONDS:
            self._fail(f"rank {line.rank} has given no sign of life for {now - line.heard:.0f} s")
        elif _STALLED_SECONDS < self._stalled(now) <= self._patience:
            return  # neither gets on: both may wait in a collective, which mostly has a time limit
        elif line.stalled > self._patience:
            self._fail(f"rank {line.rank} is alive, but has not got on for {line.stalled:.0f} s")
        elif line.stalled > _STALLED_SECONDS and not line.warned:
            line.warned = True
            log.warning("Rank %d is alive, but has not got on for %.0f s.", line.rank, line.stalled)

    def _stalled(self, now: float) -> float:
        """Return the seconds since this rank's last `check`; 0 before the first."""
        return 0.0 if self._last_check is None else now - self._last_check

    def _fail(self, reason: str, besides: _Line | None = None) -> None:
        """Pass the first failure on, and note it, unless a signal ends this rank."""
        if self._has_told:
            return
        self._has_told = True
        self._send(_FAILURE, reason, besides)
        if not self._terminated:
            self._failure, self._failed_at = reason, time.monotonic()
            log.error("Rank %d: %s", self.rank, _sentence(reason))

    def _send_outbox(self) -> None:
        while self._outbox:
            self._send(_FAILURE, self._outbox.pop(0))

    def _send(self, kind: str, text: str = "", besides: _Line | None = None) -> None:
        for line in self._lines.values():
            if line is not besides:
                line.send(kind, text)


class _Line:
    """Sends and reads lines of a word and a text over a connection to another rank."""

    def __init__(self, connection: socket.socket, of: int | None = None) -> None:
        self.socket = connection
        self.is_open, self.left, self.warned, self.terminated = True, False, False, False
        self.heard, self.stalled = time.monotonic(), 0.0
        self._rest = b""
        connection.settimeout(_SILENT_SECONDS)
        self.rank = int(self.read()[0][1]) if of is None else of

    def read(self) -> list[tuple[str, str]]:
        """Return the lines that have come in, a word and a text each; wait for the first."""
        try:
            data = self.socket.recv(1 << 16)
        except OSError:
            data = b""
        self.is_open, self.heard = bool(data), time.monotonic()
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [(kind, text) for kind, _, text in (line.decode().partition(" ") for line in lines)]

    def send(self, kind: str, text: str = "") -> None:
        """Send one line; `read` notices that the other end is gone."""
        with suppress(OSError):
            self.socket.sendall(f"{kind} {text}\n".encode())


def _sentence(failure: str) -> str:
    return f"The run cannot go on: {failure}."
