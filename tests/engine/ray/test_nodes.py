"""Engines on other nodes than the trainer's: raylets of this machine, with object stores of their own."""

import json
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from ray._private.internal_api import node_stats

from benchmarks.common.cheap_engine import CheapEngine
from tests.engine.ray.conftest import SETTINGS, STORE
from tests.support.ranks.rank_processes import run_ranks, spawned, with_root
from tests.support.ray.nodes import Placed
from tlt_lightning import RayEngine, Request, Response, Sampling
from tlt_lightning.engine.ray import cluster as clusters
from tlt_lightning.engine.ray import remote_host

pytestmark = pytest.mark.ray

SAMPLING = Sampling(max_tokens=6)
ASKED = [Request(number, [number], group=number) for number in range(6)]
BYTES = 2**20  # of weights


def weights(value: int) -> list[tuple[str, torch.Tensor]]:
    return [("a", torch.arange(BYTES // 8) % 5), ("b", torch.full((5,), value, dtype=torch.bfloat16))]


def texts(responses: Iterable[Response]) -> list[tuple[int, list[int]]]:
    return sorted((response.request_id, [*response.token_ids]) for response in responses)


def in_process(value: int, asked: list[Request] = ASKED) -> list[tuple[int, list[int]]]:
    """What an engine in the trainer's process writes."""
    engine = CheapEngine()
    engine.update_weights(weights(value), 0)
    return texts(engine.generate(asked, SAMPLING, seed=0))


def nodes_of(engine: RayEngine) -> list[str]:
    """Nodes of an engine's hosts."""
    return [host.report.state["nodes"][0] for host in engine._live.hosts]


def stores() -> dict[str, Any]:
    """What the object store of each living node counts."""
    nodes = [node for node in ray.nodes() if node["Alive"]]
    return {
        node["NodeID"]: node_stats(node["NodeManagerAddress"], node["NodeManagerPort"]).store_stats for node in nodes
    }


class Nodes:
    """Adds and kills nodes that have, unlike the trainer's, a GPU in Ray's books."""

    def __init__(self, cluster: Any) -> None:
        self.cluster, self.by_id = cluster, dict[str, Any]()

    def add(self) -> str:
        environment = {"PYTHONPATH": with_root(os.environ)["PYTHONPATH"]}
        with clusters._own_signals():
            node = self.cluster.add_node(num_cpus=3, num_gpus=1, object_store_memory=STORE, env_vars=environment)
        self.by_id[node.node_id] = node
        return node.node_id

    def kill(self, node: str) -> None:
        self.cluster.remove_node(self.by_id.pop(node), allow_graceful=False)


@pytest.fixture(scope="module")
def nodes(cluster: Any) -> Iterator[Nodes]:
    nodes = Nodes(cluster)
    for _ in range(2):
        nodes.add()
    yield nodes
    for node in [*nodes.by_id]:
        nodes.kill(node)
    cluster.wait_for_nodes()  # until Ray counts no GPU any more


@pytest.fixture(scope="module")
def engine(nodes: Nodes) -> Iterator[RayEngine]:
    """Three engines on two nodes, each of which has room for two."""
    engine = RayEngine(Placed(step_seconds=0.02), 3, gpus_per_engine=0.5)
    engine.setup("", max_model_len=32, seed=0)
    yield engine
    engine.close()


def test_each_rank_has_engines_of_its_own_in_the_cluster_of_the_environment(
    nodes: Nodes, cluster: Any, tmp_path: Path
) -> None:
    environment = {**SETTINGS, "RAY_ADDRESS": cluster.address}
    ended = run_ranks(
        "tests.support.ray.nodes",
        tmp_path,
        str(tmp_path),
        launcher=lambda rank, port: {**spawned(rank, port), **environment},
    )
    assert ended.statuses == [0, 0], ended.stderr[-3000:]
    first, second = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1))
    assert (first[0], second[0]) == ([8, 9], [11, 12])  # the prompt, and the sum of the rank's weights
    assert {*first[1], *second[1]} == nodes.by_id.keys()


def test_a_snapshot_is_fetched_once_a_node_and_old_ones_are_freed_on_all(nodes: Nodes, engine: RayEngine) -> None:
    before = stores()
    for version in range(10):
        engine.update_weights(weights(version), version)
        assert texts(engine.generate(ASKED, SAMPLING, seed=0)) == in_process(version)
    assert Counter(nodes_of(engine)).keys() == nodes.by_id.keys()
    assert engine.state_dict()["versions"] == [*range(10)]
    after = stores()
    assert len(after) == 3
    for node, store in after.items():
        fetched = store.cumulative_created_bytes - before[node].cumulative_created_bytes
        assert fetched == pytest.approx(10 * BYTES, rel=0.1)
    deadline = time.monotonic() + 30
    while (most := max(store.object_store_bytes_used for store in stores().values())) > 1.5 * BYTES:
        assert time.monotonic() < deadline, f"{most} bytes are left in a store"
        time.sleep(0.2)


def test_a_snapshot_travels_while_requests_run(engine: RayEngine) -> None:
    engine.update_weights(weights(0), 20)
    long = [Request(number, [1], group=number, max_tokens=150) for number in range(10, 16)]
    found: dict[int, Response] = {}
    for response in engine.generate([*ASKED, *long], SAMPLING, seed=0):
        if not found:
            engine.update_weights(weights(1), 21)
        found[response.request_id] = response
    old, new = (dict(in_process(value, long)) for value in (0, 1))
    for request in long:
        (_, start), (_, _) = found[request.id].segments
        assert found[request.id].policy_versions == (20, 21)
        assert [*found[request.id].token_ids] == old[request.id][:start] + new[request.id][start:]


def test_a_node_that_dies_is_replaced_where_there_is_room_and_else_ends_the_run(
    nodes: Nodes, engine: RayEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.update_weights(weights(1), 30)
    assert texts(engine.generate(ASKED, SAMPLING, seed=0)) == in_process(1)  # whose reports name the nodes
    new, asked = nodes.add(), [Request(number, [1], group=number, max_tokens=100) for number in range(9)]
    asked.append(Request(99, [1], group=99, max_tokens=1))
    (lone,) = (node for node, number in Counter(nodes_of(engine)).items() if number == 1)
    found: list[Response] = []
    for response in engine.generate(asked, SAMPLING, seed=0):
        if not found:
            nodes.kill(lone)
        found.append(response)
    assert texts(found) == in_process(1, asked)
    assert {*nodes_of(engine)} == {*nodes.by_id}
    monkeypatch.setattr(remote_host, "START_SECONDS", 1)
    nodes.kill(new)
    with pytest.raises(RuntimeError, match=r"Engine \d has not started in 1 seconds: .* the loss of a node"):
        texts(engine.generate(asked, SAMPLING, seed=0))
    engine.close()


def test_an_engine_of_two_processes_is_on_one_node(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = RayEngine(Placed(num_ranks=2), gpus_per_engine=0.5)
    engine.setup("", max_model_len=32, seed=0)
    engine.update_weights(weights(1), 0)
    assert texts(engine.generate(ASKED, SAMPLING, seed=0)) == in_process(1)
    first, second = engine.state_dict()["nodes"]
    assert first == second
    assert first in nodes.by_id
    engine.close()
    monkeypatch.setattr(clusters, "_ROOM_SECONDS", 1)
    with pytest.raises(RuntimeError, match=r"each with 5 CPU of one node, .* room: \d of \d+ CPU are free"):
        RayEngine(Placed(num_ranks=5), gpus_per_engine=0).setup("", max_model_len=32, seed=0)
