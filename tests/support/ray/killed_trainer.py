"""Begins to write with two engines on this host, says so, and goes on until it is killed."""

import signal
import sys

import torch

from benchmarks.common.cheap_engine import CheapEngine
from tlt_lightning import RayEngine, Request, Sampling


class Talker(CheapEngine):
    def setup(self, policy: str, *, max_model_len: int, seed: int) -> None:
        print("an engine talks", flush=True)
        super().setup(policy, max_model_len=max_model_len, seed=seed)


if __name__ == "__main__":
    handler = signal.getsignal(signal.SIGTERM)
    engine = RayEngine(Talker(step_seconds=0.05), num_engines=2)
    assert not any(name.partition(".")[0] == "ray" for name in sys.modules)
    engine.setup("", max_model_len=32, seed=0)
    assert signal.getsignal(signal.SIGTERM) is handler, "Ray's handler would end the run unsaved"
    engine.update_weights([("a", torch.ones(3))], 0)
    requests = [Request(number, [1], group=number, max_tokens=1 if number < 2 else 10**6) for number in range(4)]
    for _ in engine.generate(requests, Sampling(), seed=0):
        print("writes", flush=True)
