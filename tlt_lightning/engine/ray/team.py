"""Make several processes one tensor-parallel engine: the first leads, and the others make each of its calls, too."""

import os
import socket
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import ray
import torch
from ray import cloudpickle
from ray.exceptions import RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from torch import Tensor, distributed
from typing_extensions import override

from tlt_lightning.engine.base import NamedTensors, OnProgress, RolloutEngine
from tlt_lightning.engine.ray.snapshot import Snapshot
from tlt_lightning.rollout import Request, Response, Sampling

_PATIENCE = timedelta(days=365)  # the others wait for a call for as long as the policy learns
OWN_SECONDS = 2
"""Seconds after an error in which Ray will have told whether another process is gone, which explains it."""

_DEVICES = "CUDA_VISIBLE_DEVICES"

# What a launcher tells the trainer's process of itself, which an engine beside it would take for its own.
_OF_A_RANK = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    *("GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"),
    *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_NODEID"),
)


class LedEngine(RolloutEngine):
    """Leads the processes that are one engine with this one, which end with it and it with them.

    Requests are given to this process, and its engine tells the others as it does between ranks of a trainer. Weights
    are read by this process alone, which hands on each tensor: by NCCL where there are GPUs.

    Args:
        engine: This process's part, of `num_ranks` ranks.
        name: What messages call it.
    """

    def __init__(self, engine: RolloutEngine, name: str) -> None:
        self.engine, self.num_ranks, self.updates_running = engine, engine.num_ranks, engine.updates_running
        with socket.create_server(("127.0.0.1", 0)) as free:
            address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
        place = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        remote: Any = ray.remote(Follower).options(num_cpus=0, num_gpus=0, scheduling_strategy=place)
        # All see the devices of all, as vLLM expects; Ray gave them to this process.
        given = address, engine.num_ranks, os.getcwd(), os.environ.get(_DEVICES), cloudpickle.dumps(engine)
        self._actors = [remote.remote() for _ in range(1, engine.num_ranks)]
        followers = [actor.follow.remote(rank, *given) for rank, actor in enumerate(self._actors, start=1)]
        threading.Thread(target=_end_with, args=(followers, name), daemon=True).start()
        _join(0, address, engine.num_ranks)

    @override
    def setup(self, policy: str, *, max_model_len: int, seed: int) -> None:
        self._all("setup", policy, max_model_len=max_model_len, seed=seed)
        self.compute_dtype, self.weight_dtype = self.engine.compute_dtype, self.engine.weight_dtype

    @override
    def update_weights(self, named_tensors: NamedTensors, version: int) -> None:
        self._update("update_weights", named_tensors, version)

    @override
    def update_drafter(
        self, named_tensors: NamedTensors, version: int, accepted: Sequence[float] | None = None
    ) -> None:
        self._update("update_drafter", named_tensors, version, accepted)

    @override
    def warm_up(self, num_requests: int = 1) -> None:
        self._all("warm_up", num_requests)

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._all("load_state_dict", state_dict)

    @override
    def generate(
        self, requests: Sequence[Request], sampling: Sampling, *, seed: int, on_progress: OnProgress | None = None
    ) -> Iterator[Response]:
        _call("generate", ([], sampling), {"seed": seed})
        yield from self.engine.generate(requests, sampling, seed=seed, on_progress=on_progress)

    @override
    def add(self, requests: Sequence[Request]) -> None:
        self.engine.add(requests)

    @override
    def stop(self, ids: Collection[int]) -> None:
        self.engine.stop(ids)

    @override
    def stats(self) -> dict[str, float]:
        return self.engine.stats()

    @override
    def state_dict(self) -> dict[str, Any]:
        return self.engine.state_dict()

    @override
    def close(self) -> None:
        """Leave it to Ray, which ends the processes."""

    def _all(self, method: str, *arguments: Any, **named: Any) -> None:
        _call(method, arguments, named)
        getattr(self.engine, method)(*arguments, **named)

    def _update(self, method: str, snapshot: NamedTensors, *arguments: Any) -> None:
        assert isinstance(snapshot, Snapshot)
        handed = _Handed(snapshot.version, snapshot.records, snapshot.groups)
        _call(method, (replace(handed, groups=()), *arguments), {})
        getattr(self.engine, method)(handed, *arguments)


class Follower:
    """Makes every call that the first process of its engine makes; a Ray actor, which ends with the one that led it."""

    def follow(
        self, rank: int, address: str, num_ranks: int, folder: str, devices: str | None, pickled_engine: bytes
    ) -> None:
        """Follow for as long as the first process lives."""
        forget_rank()
        enter(folder)
        if devices is not None:
            os.environ[_DEVICES] = devices
        _join(rank, address, num_ranks)
        engine = cloudpickle.loads(pickled_engine)
        while True:
            method, arguments, named = _call(None, (), {})
            if method == "generate":
                for _ in engine.generate(*arguments, **named):
                    pass
            else:
                getattr(engine, method)(*arguments, **named)


class _Handed(Snapshot):
    """A snapshot whose tensors all processes yield and the first one reads, which alone knows the groups."""

    @override
    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        device = "cuda" if torch.cuda.is_initialized() else "cpu"
        rooms = ((each.name, torch.empty(each.shape, dtype=each.dtype, device=device)) for each in self.records)
        for name, tensor in super().__iter__() if self.groups else rooms:
            if tensor.numel():
                distributed.broadcast(tensor.reshape(-1).view(torch.uint8), src=0)  # in place: it is contiguous
            yield name, tensor


def forget_rank() -> None:
    """Take out of the environment what makes this process a rank of the trainer."""
    for variable in _OF_A_RANK:
        os.environ.pop(variable, None)


def enter(folder: str) -> None:
    """Work in the trainer's folder, where this node has it: paths may be relative to it."""
    if os.path.isdir(folder):
        os.chdir(folder)


def _join(rank: int, address: str, num_ranks: int) -> None:
    backend = "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(rank)
        backend = "cpu:gloo,cuda:nccl"
    distributed.init_process_group(backend, init_method=address, rank=rank, world_size=num_ranks, timeout=_PATIENCE)


def _call(method: str | None, arguments: Sequence[Any], named: dict[str, Any]) -> Any:
    """Return in all processes what the first one calls."""
    called: list[Any] = [(method, arguments, named)]
    distributed.broadcast_object_list(called, src=0, device=torch.device("cpu"))
    return called[0]


def _end_with(followers: Sequence[Any], name: str) -> None:
    """End this process as soon as another one ends, for it would wait for it in a collective; Ray begins all anew."""
    ended, _ = ray.wait([*followers])
    try:
        ray.get(ended)
    except RayActorError as death:
        print(f"{name} ends with one of its processes: {death}", flush=True)
    except RayError:
        time.sleep(2 * OWN_SECONDS)  # what has gone wrong in all of them, this one says itself
    os._exit(1)
