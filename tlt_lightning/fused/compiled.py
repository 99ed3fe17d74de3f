"""Compile functions of a few lines, which on a GPU then read and write their tensors once."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor, nn

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


def compiled_on_gpu(function: Callable[P, T]) -> Callable[P, T]:
    """Return the function of tensors with rows, the first of which decides: on a GPU it runs compiled.

    Compiling takes seconds, once for a type and a width. Where it does not work, the function runs as it is written.
    """
    compiled: Callable[P, T] | None = None
    works = True

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        nonlocal compiled, works
        rows = args[0]
        assert isinstance(rows, Tensor)
        if not (works and rows.is_cuda):
            return function(*args, **kwargs)
        if compiled is None:
            log.info("compiling `%s`", function.__qualname__)
            compiled = torch.compile(function)  # not earlier: it loads a compiler
        for each in args:
            if isinstance(each, Tensor) and not isinstance(each, nn.Parameter) and len(each) == len(rows):
                torch._dynamo.maybe_mark_dynamic(each, 0)  # else it would be compiled for every number of rows
        try:
            return compiled(*args, **kwargs)
        except torch._dynamo.exc.TorchDynamoException as error:
            works = False
            log.warning("`%s` could not be compiled and takes longer: %s", function.__qualname__, error)
            return function(*args, **kwargs)

    return call
