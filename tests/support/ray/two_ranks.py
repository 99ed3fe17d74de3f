"""Run by test_cluster.py, once per rank: engines of its own, which rank one still reads when rank zero has closed."""

import json
import os
import time
from pathlib import Path

import torch
from torch import distributed

from benchmarks.common.cheap_engine import CheapEngine
from tlt_lightning import RayEngine, Request, Sampling


def main(out: str) -> None:
    os.environ |= {"RAY_raylet_start_wait_time_s": "200"}
    rank = int(os.environ["LOCAL_RANK"])
    address = f"tcp://127.0.0.1:{os.environ['MASTER_PORT']}"
    distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    engine = RayEngine(CheapEngine(step_seconds=0.2), num_engines=2)
    engine.setup("", max_model_len=32, seed=0)
    engine.update_weights([("w", torch.full((3,), rank + 1.0))], 0)
    distributed.barrier()  # both write now, rank one for longer
    (response,) = engine.generate([Request(0, [5])], Sampling(max_tokens=1 + 15 * rank), seed=0)
    has_read = time.time()
    engine.close()
    Path(out, f"rank{rank}.json").write_text(json.dumps([[*response.token_ids][:2], has_read, time.time()]))
