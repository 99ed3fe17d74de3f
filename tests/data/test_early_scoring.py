"""Scoring in an idle window, on two processes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.ranks.rank_processes import run_ranks

pytestmark = pytest.mark.slow


def run(policy_path: str, prompts_path: str, out: Path, mode: str) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """Return the notes of each rank, and the weights in the end."""
    out.mkdir()
    script = "tests.support.ranks.two_ranks_scoring"
    ended = run_ranks(script, out, policy_path, prompts_path, str(out), mode)
    assert ended.statuses == [0, 0], ended.stderr[-3000:]
    notes = [json.loads((out / f"rank{rank}.json").read_text()) for rank in (0, 1)]
    return notes, torch.load(out / "weights0.pt", weights_only=True)


def test_scores_from_an_idle_window_are_those_of_after_it_to_the_bit(
    policy_path: str, prompts_path: str, tmp_path: Path
) -> None:
    early, weights = run(policy_path, prompts_path, tmp_path / "early", "early")
    late, expected = run(policy_path, prompts_path, tmp_path / "late", "late")
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in weights)
    assert [note["seen"] for note in early] == [note["seen"] for note in late]  # log-probs, values, hidden states
    assert [note["num_tokens"] for note in early] == [note["num_tokens"] for note in late]  # none of them twice
    for row in early[0]["rows"]:
        assert 40 < row["idle/tokens_scored"] <= 80  # two passes of rank 0, of four
        assert 0 < row["idle/seconds_scored"] < row["time/iteration"]
    assert not any("idle/tokens_scored" in row for row in late[0]["rows"])
    for number, (first, last) in enumerate(early[0]["stages"]):
        probe = ["logprobs"] if number == 0 else []
        window = first[first.index("rollout") : first.index("reward")]
        assert window[window.index("idle") :] == ["idle", "logprobs", "idle", *probe]
        assert first.count("logprobs") == 2 + len(probe)
        assert last.count("logprobs") == 1 + len(probe)
