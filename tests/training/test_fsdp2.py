from datetime import timedelta

import lightning as L
import pytest
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from tlt_lightning.training.fsdp2 import FSDP2Strategy


@pytest.mark.parametrize("num_replicas", [0, 2])
def test_copies_of_the_shards_that_ranks_cannot_hold_are_refused(num_replicas: int) -> None:
    trainer = L.Trainer(strategy=FSDP2Strategy(num_replicas=num_replicas), accelerator="cpu", devices=1, logger=False)
    with pytest.raises(MisconfigurationException, match=rf"num_replicas={num_replicas}\)` does not divide 1 ranks"):
        trainer.strategy.setup_environment()


def test_a_collective_may_take_as_long_as_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []
    monkeypatch.setattr("torch.distributed.init_process_group", lambda *_, **given: started.append(given["timeout"]))
    for arguments in ({}, {"timeout": timedelta(hours=3)}):
        strategy = FSDP2Strategy(**arguments)
        L.Trainer(strategy=strategy, accelerator="cpu", devices=1, logger=False)
        strategy._setup_distributed()
    assert started == [timedelta(minutes=30), timedelta(hours=3)]


def test_shards_are_divided_among_the_ranks_of_a_copy() -> None:
    strategy = FSDP2Strategy(num_replicas=2)
    strategy.num_nodes = 2
    strategy.parallel_devices = [None] * 4  # type: ignore[list-item]
    assert strategy.num_shards == 4
