"""Run each part of a benchmark in a process of its own, which frees the device's memory."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any


def run_apart(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call the function in a new process; return its value or raise its error."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()
