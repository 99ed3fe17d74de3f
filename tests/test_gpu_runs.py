"""Whole runs on a GPU, trainer and engine in turn."""

from pathlib import Path

import pytest
import torch

from tests.support.rl_runs import make_data, make_module, make_trainer
from tests.support.speculation_engines import save_endless_policy
from tlt_lightning import VLLMEngine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_an_engine_that_sleeps_leaves_its_memory_and_another_follows_it(prompts_path: str, tmp_path: Path) -> None:
    policy = save_endless_policy(tmp_path / "policy")
    data = make_data(prompts_path, VLLMEngine(dtype="bfloat16", kv_cache_gib=2.0, max_num_seqs=32, enforce_eager=True))
    settings = {"accelerator": "gpu", "devices": 1, "precision": "bf16-mixed", "limit_val_batches": 1.0}
    trainer, module = make_trainer(tmp_path, **settings), make_module(policy)
    trainer.fit(module, data)
    peaks = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("memory/")}
    assert peaks["memory/peak_rollout"] > 2.0
    assert peaks["memory/peak_validate"] > 2.0
    assert peaks["memory/peak_update"] < 1.0
    (held_out,) = trainer.validate(module, data, verbose=False)
    assert held_out["val/length"] == trainer.callback_metrics["val/length"] > 0
