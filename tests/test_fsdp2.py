"""Runs on two ranks that share one policy's weights, beside runs in which each has them whole (gloo)."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.rank_processes import run_ranks
from tlt_lightning import export_policy
from tlt_lightning.guard.checkpoint_io import WholeCheckpointIO
from tlt_lightning.policy import load_policy

CLOCKS = ("time/", "rollout/seconds", "rollout/tokens_per_s", "rollout/tail", "train/tokens_per_s", "train/passes")


def run(out: Path, *arguments: str) -> list[dict[str, Any]]:
    out.mkdir()
    ended = run_ranks("tests.support.two_ranks_sharded", out, *arguments[:2], str(out), *arguments[2:])
    assert ended.statuses == [0, 0], ended.stderr[-3000:]
    results = [json.loads((out / f"rank{rank}.json").read_text()) for rank in (0, 1)]
    for result in results:
        result["metrics"] = {name: each for name, each in result["metrics"].items() if not name.startswith(CLOCKS)}
    return results


def weights(out: Path, rank: int = 0) -> dict[str, torch.Tensor]:
    return torch.load(out / f"weights{rank}.pt", weights_only=True)


def whole(path: Path) -> dict[str, Any]:
    """What one process, or each rank of `ddp`, resumes from."""
    checkpoint = WholeCheckpointIO().load_checkpoint(path, weights_only=True)
    return {name: checkpoint[name] for name in ("state_dict", "optimizer_states")}


@pytest.mark.vllm
@pytest.mark.parametrize("options", ["full", "lora checkpointing"])
def test_sharded_ranks_write_and_learn_what_whole_ones_do(
    options: str, policy_path: str, prompts_path: str, tmp_path: Path
) -> None:
    ddp, fsdp2, resumed = (tmp_path / name for name in ("ddp", "fsdp2", "resumed"))
    expected = run(ddp, policy_path, prompts_path, "ddp", options)
    found = run(fsdp2, policy_path, prompts_path, "fsdp2", options)
    for rank in (0, 1):
        assert found[rank]["rollouts"] == expected[rank]["rollouts"]
        assert found[rank]["metrics"] == pytest.approx(expected[rank]["metrics"], abs=1e-4)
        torch.testing.assert_close(weights(fsdp2, rank), weights(ddp), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(whole(fsdp2 / "end.ckpt"), whole(ddp / "end.ckpt"), atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(weights(fsdp2, 1), weights(fsdp2, 0), atol=0, rtol=0)

    exported = load_policy(str(export_policy(str(fsdp2 / "end.ckpt"), str(tmp_path / "hf"), dtype="float32")))
    for name, parameter in exported.named_parameters():
        assert torch.equal(parameter, weights(fsdp2)[name])
    if options == "full":  # the rest of it once more, then what the other strategy saved
        run(resumed, policy_path, prompts_path, "fsdp2", options, str(fsdp2 / "within.ckpt"), str(ddp / "end.ckpt"))
        torch.testing.assert_close(weights(resumed), weights(fsdp2), atol=0, rtol=0)
        torch.testing.assert_close(whole(resumed / "loaded.ckpt"), whole(ddp / "end.ckpt"), atol=0, rtol=0)
