"""The vectors behind golden.json, and random batches with everything an objective may meet."""

import json
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from pathlib import Path
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tlt_lightning.rollout import RolloutBatch


def batch_of(mask: Tensor, **tensors: Any) -> RolloutBatch:
    """A batch with the given fields; the others are zeros."""
    size, num_tokens = mask.shape
    zeros = torch.zeros(size, dtype=torch.long)
    fields: dict[str, Any] = {
        "input_ids": torch.zeros(size, num_tokens + 1, dtype=torch.long),
        "prompt_lengths": zeros + 1,
        "response_mask": mask,
        "rollout_logps": torch.zeros_like(mask),
        "rewards": torch.zeros(size, dtype=mask.dtype),
        "groups": zeros,
        "policy_versions": zeros,
        "truncated": zeros.bool(),
    }
    return RolloutBatch(**{**fields, **tensors})


def sequence_of_numbers(seed: int) -> Tensor:
    """24 values in [0, 1) of a linear congruential generator: the same in any framework. (4, 6), float64"""
    numbers = []
    for _ in range(24):
        seed = (1103515245 * seed + 12345) % 2**31
        numbers.append(seed / 2**31)
    return torch.tensor(numbers, dtype=torch.float64).view(4, 6)


@pytest.fixture(scope="session")
def golden() -> dict[str, Any]:
    return json.loads((Path(__file__).parent / "golden.json").read_text())


@pytest.fixture
def vectors() -> SimpleNamespace:
    """Four sequences in two groups: the batch, and what the policy and the critic now say."""
    logps = -0.2 - 1.5 * sequence_of_numbers(1)
    old_logps = logps - 0.9 * (sequence_of_numbers(2) - 0.5)
    values = sequence_of_numbers(5) - 0.5
    mask = (torch.arange(6) < torch.tensor([6, 3, 5, 2])[:, None]).double()
    batch = batch_of(
        mask,
        rollout_logps=old_logps - 0.4 * (sequence_of_numbers(4) - 0.5),
        rewards=torch.tensor([1.0, 0.0, 0.25, 1.0], dtype=torch.float64),
        groups=torch.tensor([0, 0, 1, 1]),
        old_logps=old_logps,
        ref_logps=logps - 0.6 * (sequence_of_numbers(3) - 0.5),
        values=values,
    )
    new_values = values + 0.8 * (sequence_of_numbers(6) - 0.5)
    return SimpleNamespace(batch=batch, logps=logps, values=new_values, entropy=torch.zeros_like(logps))


@pytest.fixture
def random_vectors() -> Callable[..., SimpleNamespace]:
    """Random batches: single-token and empty responses, holes in the mask, a group of equal rewards, wide ratios."""

    def build(
        seed: int,
        *,
        num_groups: int = 3,
        group_size: int = 4,
        num_tokens: int = 9,
        spread: float = 0.5,
        dtype: torch.dtype = torch.float64,
    ) -> SimpleNamespace:
        generator = torch.Generator().manual_seed(seed)
        size = num_groups * group_size
        shape = (size, num_tokens)

        def noise(scale: float) -> Tensor:
            return scale * torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

        lengths = torch.randint(1, num_tokens + 1, (size,), generator=generator)
        lengths[0], lengths[1] = 1, num_tokens
        mask = torch.arange(num_tokens) < lengths[:, None]
        mask[1, 2:4] = False
        mask[2] = False
        rewards = torch.randint(0, 3, (size,), generator=generator).to(dtype) / 2
        rewards[-group_size:] = 0.1
        logps = -noise(1.0).abs()
        old_logps = logps - noise(spread)
        batch = batch_of(
            mask.to(dtype),
            rollout_logps=old_logps - noise(spread / 2),
            rewards=rewards,
            groups=torch.arange(num_groups).repeat_interleave(group_size) * 7 + 3,
            old_logps=old_logps,
            ref_logps=logps - noise(spread),
            values=noise(0.3),
        )
        return SimpleNamespace(batch=batch, logps=logps, values=noise(0.3), entropy=noise(1.0).abs())

    return build


@pytest.fixture
def rows_of() -> Callable[..., SimpleNamespace]:
    """Some sequences of some vectors, without the columns that are padding for all of them."""

    def select(vectors: SimpleNamespace, rows: list[int]) -> SimpleNamespace:
        num_tokens = int(vectors.batch.response_mask[rows].any(0).nonzero().max()) + 1

        def cut(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            return x[rows] if x.dim() == 1 else x[rows, : num_tokens + x.shape[1] - vectors.logps.shape[1]]

        batch = replace(vectors.batch, **{f.name: cut(getattr(vectors.batch, f.name)) for f in fields(RolloutBatch)})
        new = {name: cut(x) for name, x in vars(vectors).items() if name != "batch"}
        return SimpleNamespace(batch=batch, **new)

    return select


@pytest.fixture
def on_ranks() -> Callable[..., list[Any]]:
    """Call a function once per rank, each with its argument and a `reduce` that really sums over them."""

    def call(function: Callable[[Any, Callable[[Tensor], Tensor]], Any], arguments: list[Any]) -> list[Any]:
        barrier, slots = Barrier(len(arguments), timeout=200), [torch.tensor(math.nan)] * len(arguments)

        def rank(i: int) -> Any:
            def reduce(x: Tensor) -> Tensor:
                slots[i] = x
                barrier.wait()
                total = torch.stack(slots).sum(0)
                barrier.wait()
                return total

            return function(arguments[i], reduce)

        with ThreadPoolExecutor(len(arguments)) as pool:
            return list(pool.map(rank, range(len(arguments))))

    return call
