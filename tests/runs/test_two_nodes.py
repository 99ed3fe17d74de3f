"""Two nodes on one host, as `torchrun` and Slurm start them: the same run, and none outlives the other's failure."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SCRIPT = ["-m", "tests.support.ranks.two_nodes"]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def torchrun(node: int, port: int) -> tuple[list[str], dict[str, str]]:
    """Return what a node's agent is started with, and its environment."""
    place = ["--nnodes", "2", "--node_rank", str(node), "--master_addr", "127.0.0.1", "--master_port", str(port)]
    return [sys.executable, "-m", "torch.distributed.run", *place, "--nproc_per_node", "1", *SCRIPT], {}


def slurm(node: int, port: int) -> tuple[list[str], dict[str, str]]:
    """Return what `srun` starts a node's task with, and the environment that it sets."""
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "run", "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "1"}
    place = {"SLURM_PROCID": str(node), "SLURM_NODEID": str(node), "SLURM_LOCALID": "0", "SLURM_NODELIST": "127.0.0.1"}
    return [sys.executable, *SCRIPT], {**job, **place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def start(launcher: Any, *arguments: str) -> tuple[list[int], list[str]]:
    """Start both nodes; return how they ended, and what they wrote to stderr."""
    port = free_port()
    nodes: list[subprocess.Popen[str]] = []
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "MASTER_"))}
    for node in (0, 1):
        command, environment = launcher(node, port)
        environment = {**inherited, "PYTHONPATH": str(ROOT), **environment}
        command += arguments
        nodes.append(subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True))
    try:
        stderr = [process.communicate(timeout=280)[1] for process in nodes]
    finally:
        for process in nodes:
            process.kill()
    return [process.returncode for process in nodes], stderr


def results(out: Path) -> list[dict[str, Any]]:
    return [json.loads((out / f"rank{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize(
    ("launcher", "name"),
    [(torchrun, "TorchElasticEnvironment"), (slurm, "SLURMEnvironment")],
    ids=["torchrun", "slurm"],
)
def test_two_nodes_share_a_run_whoever_starts_them(
    launcher: Any, name: str, policy_path: str, prompts_path: str, tmp_path: Path
) -> None:
    statuses, stderr = start(launcher, policy_path, prompts_path, str(tmp_path), "whole")
    assert statuses == [0, 0], "".join(stderr)[-3000:]
    first, second = results(tmp_path)
    assert first["launcher"] == second["launcher"] == name
    assert first["weights"] == second["weights"]
    assert len({*first["prompts"]} | {*second["prompts"]}) == 8  # two iterations of four prompts, each on one node
    assert len({*first["prompts"]}) == len({*second["prompts"]}) == 4


def test_a_node_that_fails_ends_the_other_with_its_reason(policy_path: str, prompts_path: str, tmp_path: Path) -> None:
    statuses, stderr = start(torchrun, policy_path, prompts_path, str(tmp_path), "fail")
    assert 0 not in statuses
    assert "rank 1 ended with RuntimeError: the second node is made to fail" in stderr[0]
    assert not (tmp_path / "rank0.json").exists()
