"""Two ranks (gloo) warm up one head, each over its own part of the texts."""

from pathlib import Path

import pytest
import torch

from tests.conftest import save_policy
from tests.support.ranks.drafters.warmup import write_texts
from tests.support.ranks.rank_processes import Ended, run_ranks

pytestmark = pytest.mark.slow


def launch(tmp_path: Path, strategy: str) -> Ended:
    policy = str(save_policy(tmp_path / "policy", max_position_embeddings=1024))
    completions = write_texts(tmp_path / "completions.jsonl")
    return run_ranks("tests.support.ranks.drafters.warmup", tmp_path, policy, completions, str(tmp_path), strategy)


def test_ranks_read_texts_of_their_own_and_end_with_one_head(tmp_path: Path) -> None:
    ended = launch(tmp_path, "ddp")
    assert ended.statuses == [0, 0], ended.stderr[-3000:]
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1)]
    assert ranks[0]["tokens"] != ranks[1]["tokens"]
    torch.testing.assert_close(ranks[0]["weights"], ranks[1]["weights"], atol=0, rtol=0)
    torch.testing.assert_close(ranks[0]["metrics"], ranks[1]["metrics"])


def test_a_strategy_that_would_leave_the_heads_apart_is_refused(tmp_path: Path) -> None:
    ended = launch(tmp_path, "fsdp2")
    assert 0 not in ended.statuses
    assert "`strategy` FSDP2Strategy" in ended.stderr
