"""Compile functions of a few lines, which on a GPU then read and write their tensors once."""

import logging
import os
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from tlt_lightning.replacing import environment

log = logging.getLogger(__name__)

T = TypeVar("T")

_CACHE = "TORCHINDUCTOR_CACHE_DIR"
_OWN_CACHE = os.environ.get(_CACHE)
"""The compiler's folder before vLLM names another; None is the compiler's own choice."""


def compiled_on_gpu(function: Callable[..., T]) -> Callable[..., T]:
    """Return the function of tensors with rows, the first of which decides: on a GPU it runs compiled.

    No gradient passes through it: it is for the two halves of an autograd function. Compiling takes seconds, once for a
    type and a width. Where it does not work, the function runs as it is written.
    """
    compiled: Callable[..., T] | None = None
    works = True

    @wraps(function)
    def call(*args: Any) -> T:
        nonlocal compiled, works
        rows = args[0]
        assert isinstance(rows, Tensor)
        if not (works and rows.is_cuda):
            return function(*args)
        if compiled is None:
            log.info("compiling `%s`", function.__qualname__)
            compiled = torch.compile(function, backend=_compile, dynamic=False)  # not earlier: it loads a compiler
        # Detached, what needs a gradient and what does not is compiled once, and marks stay with this call.
        plain: list[Any] = [each.detach() if isinstance(each, Tensor) else each for each in args]
        for given, each in zip(args, plain, strict=True):
            if isinstance(given, Tensor) and not isinstance(given, nn.Parameter) and len(given) == len(rows):
                torch._dynamo.maybe_mark_dynamic(each, 0)  # rows alone: with widths that are known kernels are faster
        try:
            return compiled(*plain)
        except torch._dynamo.exc.TorchDynamoException as error:
            works = False
            log.warning("`%s` could not be compiled and takes longer: %s", function.__qualname__, error)
            return function(*args)

    return call


def _compile(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
    """Compile for all runs alike: vLLM moves the compiler's cache to a folder of each engine's settings."""
    from torch._inductor.compile_fx import compile_fx

    with environment(_CACHE, _OWN_CACHE):
        return compile_fx(graph, inputs)
