"""Conversations of two ranks."""

import json
from pathlib import Path

import pytest

from tests.support.ranks.rank_processes import run_ranks


@pytest.mark.slow
def test_two_ranks_hold_conversations_of_their_own(policy_path: str, prompts_path: str, tmp_path: Path) -> None:
    done = run_ranks("tests.support.ranks.conversations", tmp_path, policy_path, prompts_path, str(tmp_path))
    assert done.statuses == [0, 0], done.stderr[-3000:]
    first, second = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2))
    assert {*first["turns"], *second["turns"]} == {3}
    assert not {*first["groups"]} & {*second["groups"]}
    assert first["metrics"] == second["metrics"]
    assert first["metrics"]["mismatch/logp_abs_diff"] < 1e-4
