"""Each rank's engine on that rank's device."""

from types import SimpleNamespace

import lightning as L
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from tlt_lightning.trainer_checks import check_trainer


@pytest.mark.vllm
def test_an_engine_runs_as_its_rank_on_the_device_it_trains_on(monkeypatch: pytest.MonkeyPatch) -> None:
    from tlt_lightning.engine import vllm_executor

    executor = object.__new__(vllm_executor.RankExecutor)
    executor.vllm_config = SimpleNamespace(device_config=SimpleNamespace(device=torch.device("cuda")))
    monkeypatch.setattr(vllm_executor, "is_cpu_build", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert executor._distributed_args()[1:] == (0, 1)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 9)
    init_method, rank, device = executor._distributed_args()
    assert init_method.startswith("file://")
    assert (rank, device) == (9, 1)


def test_a_device_that_is_not_the_ranks_own_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = L.Trainer(accelerator="cpu", devices=1, max_epochs=1, logger=False)
    check_trainer(trainer)
    monkeypatch.setattr(type(trainer.strategy), "root_device", torch.device("cuda", 1))
    with pytest.raises(MisconfigurationException, match="CUDA_VISIBLE_DEVICES"):
        check_trainer(trainer)
    monkeypatch.setattr(type(trainer.strategy), "root_device", torch.device("cuda", 0))
    check_trainer(trainer)
