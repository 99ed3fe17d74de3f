"""Two nodes on one host, as `torchrun` and Slurm start them: the same run, and none outlives the other's failure."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.ranks.rank_processes import ROOT, Ended, free_port, run_ranks, with_root

pytestmark = pytest.mark.slow

SCRIPT = "tests.support.ranks.two_nodes"


def torchrun(out: Path, *arguments: str) -> Ended:
    """Start both nodes as a user does, each with its agent, and end as `run_ranks` does."""
    port = free_port()
    nodes: list[subprocess.Popen[str]] = []
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "MASTER_"))}
    for node in (0, 1):
        place = ["--nnodes", "2", "--node_rank", str(node), "--master_addr", "127.0.0.1", "--master_port", str(port)]
        command = [sys.executable, "-m", "torch.distributed.run", *place, "--nproc_per_node", "1"]
        command += ["-m", SCRIPT, *arguments]
        with (out / f"stderr{node}").open("w") as said:
            nodes.append(subprocess.Popen(command, cwd=ROOT, env=with_root(inherited), stderr=said))
    try:
        statuses = [process.wait(timeout=280) for process in nodes]
    finally:
        for process in nodes:
            process.kill()
    return Ended(statuses, "".join((out / f"stderr{node}").read_text() for node in (0, 1)))


def slurm(out: Path, *arguments: str) -> Ended:
    """Run both nodes' tasks with what `srun` sets, and without importing everything anew."""

    def place(node: int, port: int) -> dict[str, str]:
        job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "run", "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "1"}
        job |= {"SLURM_PROCID": str(node), "SLURM_NODEID": str(node), "SLURM_LOCALID": "0"}
        return {**job, "SLURM_NODELIST": "127.0.0.1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}

    return run_ranks(SCRIPT, out, *arguments, launcher=place)


def results(out: Path) -> list[dict[str, Any]]:
    return [json.loads((out / f"rank{rank}.json").read_text()) for rank in (0, 1)]


def test_two_nodes_that_slurm_starts_share_a_run_and_its_requeue(
    policy_path: str, prompts_path: str, tmp_path: Path
) -> None:
    ended = slurm(tmp_path, policy_path, prompts_path, str(tmp_path), "preempted")
    assert ended.statuses == [0, 0], ended.stderr[-3000:]
    saved = torch.load(tmp_path / "hpc_ckpt_1.ckpt", weights_only=True)
    assert (saved["global_step"], len(saved["RolloutDataModule"]["ranks"])) == (2, 2)  # before the second update
    first, second = results(tmp_path)
    assert first["launcher"] == second["launcher"] == "SLURMEnvironment"
    assert first["weights"] == second["weights"]
    assert len({*first["prompts"]} | {*second["prompts"]}) == 8  # two iterations of four prompts, each on one node
    assert len({*first["prompts"]}) == len({*second["prompts"]}) == 4


@pytest.mark.parametrize(
    ("launcher", "name"),
    [(torchrun, "TorchElasticEnvironment"), (slurm, "SLURMEnvironment")],
    ids=["torchrun", "slurm"],
)
def test_a_node_that_fails_ends_the_other_with_its_reason_and_until_then_they_share_the_run(
    launcher: Callable[..., Ended], name: str, policy_path: str, prompts_path: str, tmp_path: Path
) -> None:
    ended = launcher(tmp_path, policy_path, prompts_path, str(tmp_path), "fail")
    assert ended.statuses == [1, 1]
    assert "rank 1 ended with RuntimeError: the second node is made to fail" in (tmp_path / "stderr0").read_text()
    first, second = results(tmp_path)
    assert first["launcher"] == second["launcher"] == name
    assert first["weights"] == second["weights"]
    assert len({*first["prompts"][:8]} | {*second["prompts"]}) == 4  # of the first iteration, four responses each
