"""Sharded over four ranks, a model computes, learns and streams what it does whole (gloo)."""

from pathlib import Path

import pytest

from tests.conftest import save_policy
from tests.support.ranks.rank_processes import run_ranks


@pytest.mark.slow
def test_sharded_models_compute_what_whole_ones_do(policy_path: str, tmp_path: Path) -> None:
    """Full and with adapters, tied and untied, with and without checkpointing, and with replicas of the shards."""
    untied = str(save_policy(tmp_path / "untied", tie_word_embeddings=False))
    ended = run_ranks("tests.support.ranks.ranks_units", tmp_path, policy_path, untied, str(tmp_path), num_ranks=4)
    assert ended.statuses == [0] * 4, ended.stderr[-3000:]
