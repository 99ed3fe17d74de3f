"""Policies of random weights are whole, and the same wherever they are written."""

from pathlib import Path

import pytest
import torch

from benchmarks.common import random_policy
from benchmarks.common.shapes import SHAPES
from tlt_lightning.policy import load_policy, load_tokenizer


def test_a_policy_is_written_in_parts_and_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_policy, "FILE_BYTES", 100_000)
    monkeypatch.setattr(random_policy, "BLOCK", 10_007)  # smaller than a tensor
    paths = [str(tmp_path / name) for name in ("one", "other")]
    for path in (*paths, paths[0]):
        random_policy.write_random(SHAPES["tiny"], path)
    assert len([*Path(paths[0]).glob("*.safetensors")]) > 2
    one, other = (dict(load_policy(path).state_dict()) for path in paths)
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert torch.equal(one["model.norm.weight"], torch.ones(64))
    matrix = one["model.layers.1.mlp.up_proj.weight"]
    assert matrix.std() == pytest.approx(0.02, rel=0.1)
    assert not torch.equal(matrix, one["model.layers.2.mlp.up_proj.weight"])
    assert len(load_tokenizer(paths[0])) <= SHAPES["tiny"]["vocab_size"]
