"""Recipes for several GPUs fit the devices that they name, by the forecast at a run's start, and no fewer."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from benchmarks.common.shapes import SHAPES
from tests.recipes.test_recipes import instantiate
from tlt_lightning.training.memory.forecast import GIB
from tlt_lightning.training.memory.pass_size import choose_passes, pass_sizes, run_passes

H100, H200 = 79.6, 139.8  # GiB


def choose(cli: Any, shape: dict[str, Any], folder: Path, device_gib: float) -> int:
    """Return the tokens of a pass that a recipe's run would choose before it loads a policy of this shape."""
    module, data = cli.model, cli.datamodule
    module.policy_path = str(folder)
    (folder / "config.json").write_text(json.dumps(shape))
    longest = data.max_prompt_tokens + data.sampling.max_tokens
    sizes = pass_sizes(data.micro_batch_tokens, longest, on_gpu=True)
    candidates = run_passes(cli.trainer, module, sizes, longest=longest)
    engine = data.engine.planned_memory(str(folder), max_model_len=longest, device_bytes=device_gib * GIB)
    room = device_gib * GIB
    passes, _ = choose_passes(module, candidates, room, free=room, engine=engine, engine_sleeps=data.engine.sleeps)
    return passes.micro_batch_tokens


@pytest.mark.parametrize(
    ("name", "shape", "device_gib", "fits", "tokens", "too_few"),
    [
        ("grpo_qwen2.5-7b_fsdp2", SHAPES["7b"], H100, 4, 32768, 1),
        pytest.param("grpo_qwen2.5-7b_fsdp2", SHAPES["7b"], H200, 2, 32768, None, marks=pytest.mark.slow),
        pytest.param("grpo_qwen2.5-14b_fsdp2", SHAPES["14b"], H100, 8, 32768, 2, marks=pytest.mark.slow),
        pytest.param("grpo_qwen2.5-14b_fsdp2", SHAPES["14b"], H200, 4, 32768, 1, marks=pytest.mark.slow),
        pytest.param("grpo_qwen2.5-32b_lora_tp2", SHAPES["32b"], H100, 4, 32768, None, marks=pytest.mark.slow),
    ],
)
def test_it_fits_as_many_devices_as_it_says(
    name: str,
    shape: dict[str, Any],
    device_gib: float,
    fits: int,
    tokens: int,
    too_few: int | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "policy").mkdir()
    cli = instantiate(name, tmp_path, monkeypatch, "--trainer.devices", str(fits))
    with caplog.at_level(logging.INFO):
        assert choose(cli, shape, tmp_path / "policy", device_gib) == tokens
    assert "| **update, at its worst** |" in caplog.text
    if too_few is not None:
        monkeypatch.setattr(type(cli.trainer.strategy), "num_shards", too_few)
        with pytest.raises(MisconfigurationException, match=r"or shard over more GPUs"):
            choose(cli, shape, tmp_path / "policy", device_gib)
