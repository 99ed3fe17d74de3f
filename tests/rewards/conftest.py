"""Pools that are closed when a test is over."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tlt_lightning.rewards import RewardPool


@pytest.fixture
def make_pool() -> Iterator[Any]:
    pools: list[RewardPool] = []

    def make(*functions: Any, **settings: Any) -> RewardPool:
        pools.append(RewardPool(functions, **settings))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()
