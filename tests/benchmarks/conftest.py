"""Parts of benchmarks in processes of their own that import nothing anew."""

import multiprocessing

import pytest

from benchmarks.common import processes


@pytest.fixture
def by_forkserver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork what `run_apart` would spawn."""
    forkserver = multiprocessing.get_context("forkserver")
    monkeypatch.setattr(processes, "get_context", lambda method: forkserver)
