"""Run parts of a benchmark in processes of their own, which leave the device's memory to the next."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any


def run_apart(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return what the function returns in a new process, or raise what it raises."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()
