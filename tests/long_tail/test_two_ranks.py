"""The drafter on two processes (gloo) whose rollouts take unequally long, with the real engine."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.ranks.drafters.beside import NUM_STEPS
from tests.support.ranks.rank_processes import Ended, run_ranks
from tests.support.speculation_engines import save_endless_policy

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def launch(script: str, prompts_path: str, out: Path, *arguments: str) -> Ended:
    policy = save_endless_policy(out / "policy")
    return run_ranks(script, out, policy, prompts_path, str(out), *arguments)


def run(script: str, prompts_path: str, out: Path, *arguments: str) -> list[dict[str, Any]]:
    """Return the notes of each rank."""
    done = launch(script, prompts_path, out, *arguments)
    assert done.statuses == [0, 0], done.stderr[-3000:]
    return [json.loads((out / f"rank{rank}.json").read_text()) for rank in (0, 1)]


@pytest.fixture(scope="module")
def ranks(prompts_path: str, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run("tests.support.ranks.drafters.beside", prompts_path, tmp_path_factory.mktemp("ranks"), "run")


def test_the_early_rank_trains_while_the_late_one_writes(ranks: list[dict[str, Any]]) -> None:
    """Neither waits for the other: rank 0's last step of a window ends after the window."""
    early, late = ranks
    assert [own["steps"] for own in early["own"]] == [0, NUM_STEPS, NUM_STEPS, NUM_STEPS]
    assert not any(own["steps"] for own in late["own"])  # nobody waits for the last one
    for row, own in zip(early["rows"], early["own"], strict=True):
        assert row["drafter/micro_steps"] == own["steps"]
        assert row["drafter/idle_seconds_used"] <= row["drafter/idle_seconds_available"]
        assert row["drafter/idle_seconds_available"] == pytest.approx(2 * row["time/idle"])
    assert "drafter/preemption_ms" not in early["rows"][0]
    for row in early["rows"][1:]:
        assert row["drafter/idle_seconds_used"] > 0
        assert row["drafter/preemption_ms"] > 0


def test_both_ranks_serve_the_drafter_that_one_of_them_has_trained(ranks: list[dict[str, Any]]) -> None:
    early, late = ranks
    assert early["weights"] == late["weights"]
    assert early["rows"] == late["rows"]  # means over both
    for own in (early["own"], late["own"]):
        # Trained in iteration 2 on the states of iteration 1, served in iteration 3, not improved since.
        assert [iteration["version"] for iteration in own] == [-1, -1, 1, 1]
    assert [row["drafter/policy_lag"] for row in early["rows"][2:]] == [2, 3]  # policies are an optimizer step apart


def test_the_death_of_the_training_rank_ends_the_run_within_the_rollout(prompts_path: str, tmp_path: Path) -> None:
    done = launch("tests.support.ranks.drafters.beside", prompts_path, tmp_path, "die")
    assert done.statuses == [-signal.SIGKILL, 1]
    assert "rank 0 has died: its process ended" in done.stderr
    assert [path.name for path in sorted(tmp_path.glob("wrote*"))] == ["wrote0_0", "wrote1_0"]


def test_each_rank_resumes_from_what_it_held(prompts_path: str, tmp_path: Path) -> None:
    whole = run("tests.support.ranks.drafters.resume", prompts_path, tmp_path / "whole")
    checkpoint = tmp_path / "whole" / "epoch=1.ckpt"
    assert run("tests.support.ranks.drafters.resume", prompts_path, tmp_path / "resumed", str(checkpoint)) == whole
    early, late = whole
    own = {"optimizer", "buffer"}
    for stage in ("saved", "trained"):
        assert {part for part, value in early[stage].items() if value != late[stage][part]} >= own
    assert all(early["trained"][part] != early["saved"][part] for part in ("optimizer", "buffer"))
    assert early["end"]["vocabulary"] == late["end"]["vocabulary"]
    for path in (checkpoint, tmp_path / "whole" / "after.ckpt"):
        saved = torch.load(path, weights_only=True)
        assert saved["own"].keys() == {"CountedWindows"}  # of rank zero; the other's is beside it
        assert saved["callbacks"]["CountedWindows"]["trainer"].keys() == {"weights"}
        assert [part.name for part in Path(f"{path}.ranks").iterdir()] == [f"1-{saved['parts']}.pt"]
