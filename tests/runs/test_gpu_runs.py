"""Whole runs on a GPU, trainer and engine in turn."""

from pathlib import Path

import pytest
import torch

from tests.conftest import save_policy
from tests.support.rl_runs import make_data, make_module, make_trainer
from tests.support.speculation_engines import save_endless_policy
from tlt_lightning import VLLMEngine
from tlt_lightning.engine.planned_memory import gpu_bytes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.vllm,
    pytest.mark.slow,
]


def test_an_engine_that_sleeps_leaves_its_memory_and_another_follows_it(prompts_path: str, tmp_path: Path) -> None:
    policy = save_endless_policy(tmp_path / "policy")
    data = make_data(prompts_path, VLLMEngine(dtype="bfloat16", kv_cache_gib=2.0, max_num_seqs=32, enforce_eager=True))
    settings = {"accelerator": "gpu", "devices": 1, "precision": "bf16-mixed", "limit_val_batches": 1.0}
    trainer, module = make_trainer(tmp_path, **settings), make_module(policy)
    trainer.fit(module, data)
    assert trainer.optimizers[0].param_groups[0]["fused"] is True
    peaks = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("memory/")}
    assert peaks["memory/peak_rollout"] > 2.0
    assert peaks["memory/peak_validate"] > 2.0
    assert peaks["memory/peak_update"] < 1.0
    (held_out,) = trainer.validate(module, data, verbose=False)
    assert held_out["val/length"] == trainer.callback_metrics["val/length"] > 0


def test_an_engine_holds_the_weights_and_the_cache_that_were_planned(tmp_path: Path) -> None:
    shape = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 8, "num_key_value_heads": 2}
    policy = str(save_policy(tmp_path, num_hidden_layers=16, max_position_embeddings=8192, vocab_size=32000, **shape))
    engine = VLLMEngine(dtype="bfloat16", max_num_seqs=64)
    planned = engine.planned_memory(policy, max_model_len=2048, device_bytes=gpu_bytes())
    before = torch.cuda.memory_allocated()
    engine.setup(policy, max_model_len=2048, seed=0)
    held = torch.cuda.memory_allocated() - before
    engine.close()
    assert held == pytest.approx(planned["engine, weights"] + planned["engine, cache"], rel=0.1)
