"""Run by test_nodes.py, once per rank: an engine of its own, in the cluster that `RAY_ADDRESS` names."""

import json
import os
from pathlib import Path
from typing import Any

import ray
import torch
from torch import distributed

from benchmarks.common.cheap_engine import CheapEngine
from tlt_lightning import RayEngine, Request, Sampling
from tlt_lightning.engine.base import NamedTensors


class Placed(CheapEngine):
    """Tells on which nodes its processes are."""

    def __init__(self, step_seconds: float = 0.0, num_ranks: int = 1) -> None:
        super().__init__(step_seconds)
        self.num_ranks = num_ranks
        self.nodes: list[str] = []

    def update_weights(self, named_tensors: NamedTensors, version: int) -> None:
        super().update_weights(named_tensors, version)
        node = ray.get_runtime_context().get_node_id()
        self.nodes = [node] * self.num_ranks
        if self.num_ranks > 1:
            distributed.all_gather_object(self.nodes, node)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "nodes": self.nodes}


def main(out: str) -> None:
    rank = int(os.environ["LOCAL_RANK"])
    address = f"tcp://127.0.0.1:{os.environ['MASTER_PORT']}"
    distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    engine = RayEngine(Placed(), num_engines=2)
    engine.setup("", max_model_len=32, seed=0)
    engine.update_weights([("w", torch.full((3,), rank + 1.0))], 0)
    (response,) = engine.generate([Request(0, [5])], Sampling(max_tokens=2), seed=0)
    Path(out, f"rank{rank}.json").write_text(json.dumps([[*response.token_ids], engine.state_dict()["nodes"]]))
    engine.close()
