import ast
import builtins
import dis
import gc
import importlib.metadata
import inspect
import logging
import os
import re
import sys
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import CellType, CodeType
from typing import Any

import numpy as np
import pytest
import torch
from packaging.version import Version
from transformers import AutoModelForCausalLM, PretrainedConfig

from tlt_lightning.engine.vllm import internals
from tlt_lightning.engine.vllm.required.parts import REQUIRED, check_required
from tlt_lightning.engine.vllm.required.version import check_version

PACKAGE = Path(internals.__file__).parents[2]
ROOM = PACKAGE / "engine/vllm"
# Whose attributes are not vLLM's, nor this package's own.
OTHERS: tuple[Any, ...] = (
    *(torch, torch.Tensor, torch.nn, torch.nn.Module, torch.cuda, torch.cpu, torch.distributed, torch.linalg, torch._C),
    *(torch.Generator, torch.version, np, np.ndarray, PretrainedConfig, AutoModelForCausalLM),
    *(builtins, type, str, list, dict, set, object, Counter, Path, Version, re.Pattern, CellType, type(lambda: 0)),
    *(dis, dis.Instruction, gc, importlib, importlib.metadata, inspect, inspect.BoundArguments, logging, sys, os, time),
    *(inspect.Signature, CodeType, logging.Logger, ExitStack, zlib, BaseException),
)
OF_OTHERS = {
    *("multi_processor_count", "layer_types", "layers_block_type", "rope_parameters", "rope_scaling"),
    "_torchdynamo_orig_callable",
    "_cuda_clearCublasWorkspaces",
}


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1", "0.32.0+cpu"])
def test_supported_versions_pass(version: str) -> None:
    check_version(Version(version))


@pytest.mark.parametrize("version", ["0.31.9", "0.33.0", "1.0"])
def test_other_versions_are_refused_with_the_supported_range(version: str) -> None:
    with pytest.raises(ImportError, match=r">=0\.32\.0,<0\.33\.0"):
        check_version(Version(version))


def test_a_missing_internal_names_itself_and_the_supported_versions() -> None:
    with pytest.raises(RuntimeError, match=r"missing: `moved`.*>=0\.32\.0"):
        internals.reach(internals, "reach.moved")


@pytest.mark.vllm
def test_all_that_is_reached_inside_vllm_is_there() -> None:
    check_required()


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("place", "name"),
    [
        ("v1.core.sched.scheduler.Scheduler", "walking"),
        ("v1.core.sched.scheduler.Scheduler", "append"),  # read there, of lists, and never assigned
        ("v1.core.sched.scheduler.Scheduler", "schedule()"),
        ("v1.core.sched.scheduler.Scheduler", "schedule(throttle)"),
        ("v1.core.sched.scheduler.Planner", "schedule(throttle_prefills)"),
        ("v1.core.plan", "anything"),
    ],
)
def test_a_name_or_a_parameter_that_has_moved_is_named_with_the_supported_versions(place: str, name: str) -> None:
    with pytest.raises(RuntimeError, match=rf"{re.escape(place)}: {re.escape(name)}\. .*>=0\.32\.0"):
        check_required({place: name})


def attributes(path: Path) -> Iterator[str]:
    """Yield the attributes that a file reads, by dots or by the names in `reach`, `getattr` and `hasattr`."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            yield node.attr
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) > 1:
            name = node.args[1]
            if node.func.id in {"reach", "getattr", "hasattr"} and isinstance(name, ast.Constant):
                yield from name.value.split(".")


def own_names(path: Path) -> Iterator[str]:
    """Yield the names that a file of ours defines, attributes of `self` among them."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            yield node.attr


@pytest.mark.vllm
def test_every_attribute_of_vllm_that_is_used_is_among_those_that_are_checked() -> None:
    from vllm import RequestOutput, SamplingParams
    from vllm.sampling_params import RequestOutputKind

    public = (SamplingParams, RequestOutput, RequestOutputKind)
    known = {name for path in PACKAGE.rglob("*.py") for name in own_names(path)} | OF_OTHERS
    known |= {name for each in (*public, *OTHERS) for name in dir(each)}
    known |= set(re.findall(r"\w+", " ".join([*REQUIRED.values(), *(key.rpartition(".")[2] for key in REQUIRED)])))
    used = {(name, path.name) for path in ROOM.rglob("*.py") for name in attributes(path)}
    assert sorted(pair for pair in used if pair[0] not in known) == []
