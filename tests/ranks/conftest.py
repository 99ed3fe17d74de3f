"""The process of the tests gets through its exit in its own time."""

import pytest

from tlt_lightning.ranks import liveness


class NoExit:
    """Takes no function to call at the exit."""

    def register(self, *_: object) -> None: ...


@pytest.fixture(autouse=True)
def no_alarm(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that knows of a failure has seconds to exit, and then an alarm ends it; this process is none."""
    monkeypatch.setattr(liveness, "atexit", NoExit())
