"""Run each part of a benchmark in processes of its own, which frees the device's memory."""

from __future__ import annotations

import os
import signal
import socket
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from typing import Any


def run_apart(function: Callable[..., Any], *arguments: Any, num_ranks: int = 1) -> Any:
    """Call the function in a new process; return its value or raise its error.

    With several ranks each has a process and a device; the value is the first one's, and an error ends all.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with ProcessPoolExecutor(num_ranks, mp_context=get_context("spawn")) as pool:
        if num_ranks == 1:
            return pool.submit(function, *arguments).result()
        ranks = [pool.submit(_be_rank, rank, num_ranks, port, function, *arguments) for rank in range(num_ranks)]
        return ranks[0].result()


def end_process(process: BaseProcess, seconds: float) -> None:
    """Wait for a process, and end it once its time is up; with `faulthandler` enabled it says where its threads are."""
    process.join(max(0.0, seconds))
    if process.is_alive() and process.pid is not None:
        os.kill(process.pid, signal.SIGABRT)
        process.join(10)
    process.kill()
    process.join()


def _be_rank(rank: int, num_ranks: int, port: int, function: Callable[..., Any], *arguments: Any) -> Any:
    import torch

    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(rank)
    torch.distributed.init_process_group(
        "nccl" if on_gpu else "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=num_ranks
    )
    try:
        value = function(*arguments)
    except BaseException:
        traceback.print_exc()
        os._exit(1)  # ends the others, too, which wait for this one
    torch.distributed.destroy_process_group()
    return value
