"""A cluster of this host for each process that runs tests; what is in it ends with them."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

# Before Ray is imported: a crowded machine starts slowly, and none of its memory limits is ours.
SETTINGS = {"RAY_raylet_start_wait_time_s": "200", "RAY_memory_monitor_refresh_ms": "0", "RAY_AUTH_MODE": "disabled"}


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    before = {name: os.environ.get(name) for name in (*SETTINGS, "PYTHONPATH")}
    root = Path(__file__).parents[3]
    paths = [str(root / "tests/support/ray/start"), str(root), before["PYTHONPATH"]]
    os.environ.update(SETTINGS, PYTHONPATH=os.pathsep.join(filter(None, paths)))
    import ray

    options = {"include_dashboard": False, "log_to_driver": False, "object_store_memory": 80 * 2**20}
    handler = signal.getsignal(signal.SIGTERM)
    ray.init(address="local", num_cpus=4, **options)  # type: ignore[arg-type]
    signal.signal(signal.SIGTERM, handler)  # Ray brings one of its own
    restore("PYTHONPATH", before["PYTHONPATH"])  # other tests' processes are not Ray's
    yield
    ray.shutdown()
    for name in SETTINGS:
        restore(name, before[name])


def restore(name: str, value: str | None) -> None:
    os.environ.pop(name)
    if value is not None:
        os.environ[name] = value
