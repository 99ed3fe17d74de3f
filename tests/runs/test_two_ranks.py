"""Data-parallel runs on two processes (gloo)."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.support.ranks.rank_processes import Ended, run_ranks, with_root
from tests.support.report_pages import read_page
from tlt_lightning.data.prompts import PromptCursor
from tlt_lightning.objectives import ReinforcePlusPlus
from tlt_lightning.policy import load_policy, response_logps
from tlt_lightning.rollout import RolloutBatch

SCRIPT = Path(__file__).parents[1] / "support/ranks/two_ranks.py"


def launch(policy_path: str, prompts_path: str, out: Path, *arguments: str) -> Ended:
    """Run it as a user would: Lightning starts rank 1, and the status is that of rank 0."""
    command = [sys.executable, str(SCRIPT), policy_path, prompts_path, str(out), *arguments]
    done = subprocess.run(command, env=with_root(os.environ), capture_output=True, text=True, timeout=200)
    return Ended([done.returncode], done.stderr)


def fork(policy_path: str, prompts_path: str, out: Path, *arguments: str) -> Ended:
    """Run both ranks without importing everything anew."""
    return run_ranks("tests.support.ranks.two_ranks", out, policy_path, prompts_path, str(out), *arguments)


def check_gradients(policy_path: str, out: Path, *passes: list[int]) -> None:
    """The first step's gradients are those of both ranks' sequences in one process, in one pass each."""
    assert max(max(each) for each in passes) > 1
    assert passes[0] != passes[1]  # ranks need not agree on the number of their passes
    saved = [torch.load(out / f"update{rank}.pt", weights_only=True) for rank in (0, 1)]
    batches = [RolloutBatch(**fields) for fields, _ in saved]
    counts = torch.tensor([batch.count_loss(range(len(batch))) for batch in batches]).sum(0).tolist()
    model, objective = load_policy(policy_path), ReinforcePlusPlus()
    for batch in batches:
        whole = replace(batch, num_loss_tokens=counts[0], num_loss_sequences=counts[1], num_shares=1)
        logps, entropy, *_ = response_logps(model, whole)
        old_logps = logps.detach() if whole.old_logps is None else whole.old_logps
        objective.loss(replace(whole, old_logps=old_logps), logps, entropy, None).loss.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(saved[0][1][name], parameter.grad, atol=1e-6, rtol=1e-4)
        assert torch.equal(saved[0][1][name], saved[1][1][name])


@pytest.mark.parametrize(
    ("start", "engine", "mode"),
    [
        pytest.param(launch, "transformers", "whitened", marks=pytest.mark.slow),
        pytest.param(fork, "vllm", "plain", marks=pytest.mark.vllm),
    ],
)
def test_two_ranks_share_the_work_and_end_with_the_same_weights(
    start: Callable[..., Ended], engine: str, mode: str, policy_path: str, prompts_path: str, tmp_path: Path
) -> None:
    ended = start(policy_path, prompts_path, tmp_path, engine, mode)
    assert set(ended.statuses) == {0}, ended.stderr[-3000:]
    first, second = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1))
    assert first["weights"] == second["weights"]
    assert [len(first["batches"]), len(second["batches"])] == [2, 2]
    if mode == "whitened":
        check_gradients(policy_path, tmp_path, first["batches"], second["batches"])
    assert set(first["versions"]) == set(second["versions"]) == {0, 1}
    assert not set(first["prompts"][-4:]) & set(second["prompts"][-4:])
    assert first["metrics"] == second["metrics"]
    # Rank 0 is done early, waits for one rank, and its window closes when rank 1 has finished its slow steps.
    assert [window["waiting_for"] for window in first["windows"]] == [1, 1]
    assert all(window["seconds"] > 0.2 for window in first["windows"])
    assert second["windows"] == []  # nobody waits for the last one
    assert first["sums"] == second["sums"] == [[2, 1]] * 2  # what a rank hands in stays its own
    assert first["metrics"]["time/idle"] > 0.05
    ranks = read_page(tmp_path / "report")["details"]["2"]["ranks"]
    stages = [[stage for stage, _ in rank if stage in ("sync", "rollout", "idle", "update")] for rank in ranks]
    assert [list(dict.fromkeys(each)) for each in stages] == [["sync", "rollout", "idle", "update"]] * 2
    seconds = [dict(rank) for rank in ranks]
    assert seconds[0]["idle"] > 0.2
    assert seconds[1]["rollout"] > 0.2  # of the straggler, who sleeps


@pytest.mark.slow
def test_a_rank_that_has_its_groups_waits_while_the_other_replaces_its_own(
    policy_path: str, prompts_path: str, tmp_path: Path
) -> None:
    ended = fork(policy_path, prompts_path, tmp_path, "transformers", "dynamic")
    assert ended.statuses == [0, 0], ended.stderr[-3000:]
    first, second = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1))
    assert (first["starts"], first["ends"]) == (1, [8])
    assert (second["starts"], second["ends"]) == (1, [16])  # two rounds are one rollout to callbacks
    assert [window["waiting_for"] for window in first["windows"]] == [1, 1]
    metrics = first["metrics"]
    assert metrics == second["metrics"]
    assert (metrics["rollout/groups_drawn"], metrics["rollout/groups_without_signal_kept"]) == (6, 0)
    assert first["weights"] == second["weights"]


@pytest.mark.slow
def test_a_dying_rank_ends_the_run(policy_path: str, prompts_path: str, tmp_path: Path) -> None:
    ended = fork(policy_path, prompts_path, tmp_path, "transformers", "die")
    assert ended.statuses == [1, 3]
    assert "rank 1 has died: its process ended" in ended.stderr


@pytest.mark.slow
def test_two_ranks_repeat_an_iteration_that_was_saved_before_its_update_exactly(
    policy_path: str, prompts_path: str, tmp_path: Path
) -> None:
    def run(name: str, *checkpoint: str) -> list[dict]:
        out = tmp_path / name
        out.mkdir()
        ended = run_ranks("tests.support.ranks.two_ranks_within", out, policy_path, prompts_path, str(out), *checkpoint)
        assert ended.statuses == [0, 0], ended.stderr[-3000:]
        return [json.loads((out / f"rank{rank}.json").read_text()) for rank in (0, 1)]

    whole = run("whole")
    resumed = run("resumed", str(tmp_path / "whole" / "within.ckpt"))
    assert len({state["weights"] for state in (*whole, *resumed)}) == 1
    assert {state["steps"] for state in (*whole, *resumed)} == {12}
    assert [state["loaded"] for state in resumed] == [1, 2]  # each rank's engine has its own state back
    assert sorted(whole[0]["held_out"] + whole[1]["held_out"]) == list(range(9))  # each answered by one rank
    assert abs(len(whole[0]["held_out"]) - len(whole[1]["held_out"])) == 1
    assert whole[0]["rows"].keys() == {"2", "3"}
    assert [state["prompts"][-1] for state in resumed] == [state["prompts"][-1] for state in whole]
    drawn = PromptCursor(len(Path(prompts_path).read_text().splitlines()), 3).peek(12)
    learned = [prompt for state in whole for iteration in state["prompts"] for prompt in iteration]
    assert sorted(learned) == sorted(drawn)
    for number, row in whole[0]["rows"].items():  # what rank 1 had seen of the iteration counts, too
        assert resumed[0]["rows"][number] == pytest.approx(row)
