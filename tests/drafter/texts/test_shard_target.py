"""A target that is sharded over two ranks (gloo) teaches what a whole one does."""

from pathlib import Path

import pytest
import torch

from tests.conftest import save_policy
from tests.support.ranks.drafters.warmup import write_texts
from tests.support.ranks.rank_processes import Ended, run_ranks

pytestmark = pytest.mark.slow


def launch(tmp_path: Path, strategy: str, shard_target: bool) -> Ended:
    policy = str(save_policy(tmp_path / "policy", max_position_embeddings=1024))
    completions = write_texts(tmp_path / "completions.jsonl")
    arguments = (policy, completions, str(tmp_path), strategy, str(shard_target))
    return run_ranks("tests.support.ranks.drafters.warmup", tmp_path, *arguments)


def test_heads_learn_the_same_from_a_sharded_target_as_from_a_whole_one(tmp_path: Path) -> None:
    for shard_target in (False, True):
        ended = launch(tmp_path, "ddp", shard_target)
        assert ended.statuses == [0, 0], ended.stderr[-3000:]
    whole, sharded = (
        [torch.load(tmp_path / f"ddp_{shard_target}_{rank}.pt") for rank in (0, 1)] for shard_target in (False, True)
    )
    assert [rank["held"] for rank in whole] == [1, 1]
    assert [rank["held"] for rank in sharded] == pytest.approx([0.5, 0.5], abs=0.01)  # also after the last pass
    assert whole[0]["passes"] != whole[1]["passes"]  # of its own; sharded, a rank waits for nobody in vain
    assert sharded[0]["passes"] == sharded[1]["passes"]
    for rank in (0, 1):
        assert sharded[rank]["tokens"] == whole[rank]["tokens"]
        torch.testing.assert_close(sharded[rank]["weights"], whole[rank]["weights"], atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(sharded[rank]["metrics"], whole[rank]["metrics"], atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(sharded[0]["weights"], sharded[1]["weights"], atol=0, rtol=0)


def test_a_strategy_that_would_leave_the_heads_apart_is_refused(tmp_path: Path) -> None:
    ended = launch(tmp_path, "fsdp2", True)
    assert 0 not in ended.statuses
    assert "`strategy` FSDP2Strategy" in ended.stderr
    assert "`shard_target`" in ended.stderr
