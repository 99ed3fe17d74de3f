"""Plugins of somebody who has read the documentation, and has made a mistake."""

from dataclasses import dataclass
from typing import Any

import pytest

from tlt_lightning import (
    RewardTerm,
    RolloutDataModule,
    TransformersEngine,
)
from tlt_lightning.objectives import GRPO
from tlt_lightning.objectives.advantages import GroupCentred
from tlt_lightning.rewards import exact_match


def mine(base: type, **members: Any) -> Any:
    """Return an object of a class `Mine`, derived from `base` with these methods."""
    return type("Mine", (base,), members)()


def data(**arguments: Any) -> RolloutDataModule:
    return RolloutDataModule(
        **{"engine": TransformersEngine(), "rewards": [RewardTerm(function=exact_match)], **arguments}
    )


async def wait(*_: Any, **__: Any) -> None: ...


@dataclass(kw_only=True)
class Weighted(GRPO):
    weight: float = 0.5


def test_pieces_are_objects() -> None:
    Weighted(advantage=GroupCentred())
    with pytest.raises(
        TypeError, match=r"`advantage` must be an AdvantageEstimator, got the class GroupCentred itself"
    ):
        Weighted(advantage=GroupCentred)
    with pytest.raises(TypeError, match=r"`advantage` must be an AdvantageEstimator, got a function"):
        Weighted(advantage=lambda *_: None)
    with pytest.raises(TypeError, match="`surrogate` must be a Surrogate, got None"):
        Weighted(surrogate=None)
