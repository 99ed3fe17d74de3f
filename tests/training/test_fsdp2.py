from datetime import timedelta

import lightning as L
import pytest

from tlt_lightning.training.fsdp2 import FSDP2Strategy


def test_a_collective_may_take_as_long_as_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []
    monkeypatch.setattr("torch.distributed.init_process_group", lambda *_, **given: started.append(given["timeout"]))
    for arguments in ({}, {"timeout": timedelta(hours=3)}):
        strategy = FSDP2Strategy(**arguments)
        L.Trainer(strategy=strategy, accelerator="cpu", devices=1, logger=False)
        strategy._setup_distributed()
    assert started == [timedelta(minutes=30), timedelta(hours=3)]
