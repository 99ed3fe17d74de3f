from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tlt_lightning.ranks.reduce import gather_over_ranks, largest_over_ranks, sum_over_ranks


class Strategy:
    """Two ranks that have the same, so that the sum is twice as much; but the other's largest is 1.75."""

    root_device = torch.device("cpu")

    def reduce(self, value: torch.Tensor, reduce_op: str) -> torch.Tensor:
        return {"sum": value.mul_, "max": value.clamp_min_}[reduce_op](2 if reduce_op == "sum" else 1.75)


def test_ranks_add_up_or_learn_all_and_one_alone_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def gather(ranks: list[Any], own: Any) -> None:
        ranks[:] = [own, "the other's"]

    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    trainer: Any = SimpleNamespace(world_size=2, strategy=Strategy())
    value = torch.tensor([1.5, 2.0])
    assert sum_over_ranks(trainer, value).tolist() == [3.0, 4.0]
    assert largest_over_ranks(trainer, value).tolist() == [1.75, 2.0]
    assert value.tolist() == [1.5, 2.0]
    assert gather_over_ranks(trainer, "own") == ["own", "the other's"]
    trainer.world_size, trainer.strategy = 1, None
    assert sum_over_ranks(trainer, value) is value
    assert gather_over_ranks(trainer, "own") == ["own"]
