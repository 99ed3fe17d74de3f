"""When an engine is given the policy's weights, on one rank and where ranks do so together."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tlt_lightning.data.weight_sync import WeightSync
from tlt_lightning.training.fsdp2 import FSDP2Strategy


class Module(nn.Linear):
    def policy_weights(self) -> list[Any]:
        return [*self.named_parameters()]


class Engine:
    policy_version, num_ranks = -1, 1

    def __init__(self) -> None:
        self.updates: list[int] = []
        self.warmed: list[int] = []
        self.fails = False

    def update_weights(self, tensors: Any, version: int) -> None:
        self.updates.append(version)
        assert not self.fails

    def warm_up(self, num_requests: int = 1) -> None:
        self.warmed.append(num_requests)


def trainer_of(strategy: Any) -> Any:
    return SimpleNamespace(lightning_module=Module(2, 2), global_step=3, callbacks=[], strategy=strategy)


def test_weights_are_brought_when_anybody_has_changed_them() -> None:
    engine: Any = Engine()
    weights, trainer = WeightSync(engine), trainer_of(None)
    for _ in range(2):
        weights.sync(trainer)
    with torch.no_grad():
        trainer.lightning_module.weight.data += 1
    weights.sync(trainer, 7)
    assert engine.updates == [3, 3]
    assert engine.warmed == [1, 7]


def test_after_an_update_that_failed_even_the_weights_of_before_are_brought_again() -> None:
    engine: Any = Engine()
    weights, trainer = WeightSync(engine), trainer_of(None)
    weights.sync(trainer)
    before = trainer.lightning_module.weight.data.clone()
    trainer.lightning_module.weight.data += 1
    engine.fails = True
    with pytest.raises(AssertionError):
        weights.sync(trainer)
    engine.fails, trainer.lightning_module.weight.data = False, before
    weights.sync(trainer)
    assert engine.updates == [3] * 3


@pytest.mark.parametrize(("strategy", "num_ranks"), [(FSDP2Strategy(), 1), (SimpleNamespace(), 2)])
def test_a_change_that_only_another_rank_sees_is_brought_too(strategy: Any, num_ranks: int) -> None:
    engine: Any = Engine()
    engine.num_ranks = num_ranks
    asked: list[bool] = []

    def ask(own: bool, all: bool) -> bool:
        asked.append(own)
        return not all

    strategy.reduce_boolean_decision = ask
    weights, trainer = WeightSync(engine), trainer_of(strategy)
    for _ in range(2):
        weights.sync(trainer)
    assert asked == [False, True]
    assert engine.updates == [3, 3]
