"""Plugins of somebody who has read the documentation, and has made a mistake."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from tlt_lightning import (
    DrafterModule,
    FixedSelector,
    LongTailIdleCallback,
    RewardTerm,
    RLModule,
    RolloutDataModule,
    Speculation,
    SynchronousSchedule,
    TransformersEngine,
)
from tlt_lightning.long_tail.budget import FixedBudget
from tlt_lightning.objectives import GRPO
from tlt_lightning.objectives.advantages import GroupCentred
from tlt_lightning.rewards import exact_match
from tlt_lightning.speculation.graphs.pool import BucketedGraphPool, arms_by_batch
from tlt_lightning.speculation.strategy import OFF, Strategy


def mine(base: type, **members: Any) -> Any:
    """Return an object of a class `Mine`, derived from `base` with these methods."""
    return type("Mine", (base,), members)()


def data(**arguments: Any) -> RolloutDataModule:
    return RolloutDataModule(
        **{"engine": TransformersEngine(), "rewards": [RewardTerm(function=exact_match)], **arguments}
    )


async def wait(*_: Any, **__: Any) -> None: ...


@pytest.mark.parametrize(
    ("use", "base", "method", "called_with"),
    [
        (lambda plugin: RLModule("policy", plugin), GRPO, "advantages", "batch, reduce"),
        (lambda plugin: RLModule("policy", plugin), GRPO, "loss", "batch, logps, entropy, values"),
        (lambda plugin: GRPO(advantage=plugin), GroupCentred, "__call__", "batch, rewards, token_rewards, reduce"),
        (lambda plugin: data(schedule=plugin), SynchronousSchedule, "begin", "demand, aside"),
        (
            lambda plugin: data(engine=plugin),
            TransformersEngine,
            "generate",
            "requests, sampling, seed=..., on_progress=...",
        ),
        (lambda plugin: Speculation(selector=plugin, ngram=True), FixedSelector, "select", "state"),
        (
            lambda plugin: Speculation(selector=FixedSelector(3), ngram=True, graph_pool=plugin),
            BucketedGraphPool,
            "plan",
            "arms, capture_sizes",
        ),
        (
            lambda plugin: LongTailIdleCallback(DrafterModule.__new__(DrafterModule), budget=plugin),
            FixedBudget,
            "decide",
            "iteration, remaining",
        ),
    ],
)
def test_a_method_that_cannot_be_called_is_refused_where_the_plugin_is_given(
    use: Callable[[Any], Any], base: type, method: str, called_with: str
) -> None:
    given = {"__init__": lambda self: None} if base is FixedSelector else {}
    with pytest.raises(TypeError, match=rf"`Mine\.{method}` is called with \({called_with}\): too many positional"):
        use(mine(base, **given, **{method: lambda self: None}))
    with pytest.raises(TypeError, match=rf"`Mine\.{method}` is async, .*drop `async`"):
        use(mine(base, **given, **{method: wait}))


def test_a_method_in_the_place_of_a_property_is_refused() -> None:
    """It would be true, whatever it returns."""
    with pytest.raises(TypeError, match=r"`Mine\.needs_entropy_grad` is a method.*add `@property`"):
        RLModule("policy", mine(GRPO, needs_entropy_grad=lambda self: False))
    RLModule("policy", mine(GRPO, needs_entropy_grad=True))


@dataclass(kw_only=True)
class Weighted(GRPO):
    weight: float = 0.5


def test_pieces_are_objects() -> None:
    Weighted(advantage=GroupCentred())
    with pytest.raises(TypeError, match=r"`advantage` must be a AdvantageEstimator, got the class GroupCentred itself"):
        Weighted(advantage=GroupCentred)
    with pytest.raises(TypeError, match=r"`advantage` must be a AdvantageEstimator, got a function.*GroupNormalized"):
        Weighted(advantage=lambda *_: None)
    with pytest.raises(TypeError, match="`surrogate` must be a Surrogate, got a NoneType"):
        Weighted(surrogate=None)


@pytest.mark.parametrize("arms", [None, Strategy(3, "sibling"), (0, 3), (each for each in (OFF,))])
def test_arms_that_are_no_strategies_are_refused(arms: Any) -> None:
    selector = mine(FixedSelector, __init__=lambda self: None, arms=lambda self, batch_size: arms)
    with pytest.raises(TypeError, match=r"`Mine\.arms` returned .* for a batch of 1; return a tuple of them"):
        arms_by_batch(selector, 4)
