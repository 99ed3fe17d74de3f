"""Each rank's engine on that rank's device."""

from types import SimpleNamespace

import lightning as L
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from tlt_lightning.checks import check_trainer


@pytest.mark.vllm
def test_an_engine_runs_as_its_rank_on_the_device_it_trains_on(monkeypatch: pytest.MonkeyPatch) -> None:
    from tlt_lightning.engine.vllm import executor as executors

    executor = object.__new__(executors.RankExecutor)
    executor.vllm_config = SimpleNamespace(device_config=SimpleNamespace(device=torch.device("cuda")))
    monkeypatch.setattr(executors, "is_cpu_build", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert executor._distributed_args()[1:] == (0, 1)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 9)
    init_method, rank, device = executor._distributed_args()
    assert init_method.startswith("file://")
    assert (rank, device) == (9, 1)


@pytest.mark.vllm
def test_the_kv_cache_is_no_larger_than_all_requests_can_fill(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.executor.uniproc_executor import UniProcExecutor
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

    from tlt_lightning.engine.vllm.executor import RankExecutor

    free, layer = 1 << 30, {"block_size": 16, "num_kv_heads": 2, "head_size": 8, "dtype": torch.bfloat16}
    cache = SimpleNamespace(kv_cache_memory_bytes=None)
    executor = object.__new__(RankExecutor)
    executor.vllm_config = SimpleNamespace(
        cache_config=cache,
        scheduler_config=SimpleNamespace(max_num_seqs=3, max_num_batched_tokens=64, async_scheduling=True),
        model_config=SimpleNamespace(max_model_len=100),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1, tensor_parallel_size=1),
        max_in_flight_tokens=128,
    )
    specs = {"0": FullAttentionSpec(**layer), "1": FullAttentionSpec(**layer)}
    monkeypatch.setattr(UniProcExecutor, "determine_available_memory", lambda self: [free])
    monkeypatch.setattr(RankExecutor, "get_kv_cache_specs", lambda self: [specs])
    page = 2 * 16 * 2 * 8 * 2  # keys and values
    assert executor.determine_available_memory() == [2 * 3 * (7 + 1) * page]  # 100 tokens fill 7 blocks
    free = 5 * page
    assert executor.determine_available_memory() == [free]
    free = 1 << 30
    cache.kv_cache_memory_bytes = free
    assert executor.determine_available_memory() == [free]  # as asked for
    cache.kv_cache_memory_bytes = None
    specs["1"] = SlidingWindowSpec(**layer, sliding_window=32)
    assert executor.determine_available_memory() == [free]


def test_a_device_that_is_not_the_ranks_own_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = L.Trainer(accelerator="cpu", devices=1, max_epochs=1, logger=False)
    check_trainer(trainer)
    monkeypatch.setattr(type(trainer.strategy), "root_device", torch.device("cuda", 1))
    with pytest.raises(MisconfigurationException, match="CUDA_VISIBLE_DEVICES"):
        check_trainer(trainer)
    monkeypatch.setattr(type(trainer.strategy), "root_device", torch.device("cuda", 0))
    check_trainer(trainer)
