"""A cluster of this host for each process that runs tests; what is in it ends with them."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
import ray
import torch
from ray.cluster_utils import Cluster

from tests.support.ranks.rank_processes import with_root
from tlt_lightning.engine.ray import cluster as clusters

# For processes of Ray: a crowded machine starts slowly, and none of its memory limits is ours. A node that refuses
# connections is given up in a second.
SETTINGS = {
    "RAY_raylet_start_wait_time_s": "200",
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_AUTH_MODE": "disabled",
    "RAY_health_check_period_ms": "200",
}
STORE = 80 * 2**20
"""Bytes of a node's object store."""


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    before = {name: os.environ.get(name) for name in (*SETTINGS, "PYTHONPATH")}
    os.environ.update(SETTINGS, PYTHONPATH=with_root(os.environ)["PYTHONPATH"])
    devices = {"num_cpus": 4, "num_gpus": torch.cuda.device_count()}
    head = {**devices, "object_store_memory": STORE, "include_dashboard": False}
    with clusters._own_signals():
        cluster = Cluster(True, head_node_args=head)
        ray.init(address=cluster.address, log_to_driver=False)
    restore("PYTHONPATH", before["PYTHONPATH"])  # other tests' processes are not Ray's
    yield cluster
    ray.shutdown()
    cluster.shutdown()
    for name in SETTINGS:
        restore(name, before[name])


def restore(name: str, value: str | None) -> None:
    os.environ.pop(name)
    if value is not None:
        os.environ[name] = value
