"""Runs on two ranks that share one policy's weights, beside runs in which each has them whole (gloo)."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import WORDS, save_policy, save_tokenizer
from tests.support.ranks.rank_processes import ROOT, run_ranks, with_root
from tlt_lightning import export_policy
from tlt_lightning.guard.checkpoint_io import WholeCheckpointIO
from tlt_lightning.policy import load_policy

RATES = ("rollout/seconds", "rollout/tokens_per_s", "rollout/tail", "train/tokens_per_s", "train/passes")
CLOCKS = ("time/", "idle/", *RATES)


def run(out: Path, *arguments: str, num_ranks: int = 2) -> list[dict[str, Any]]:
    out.mkdir()
    script, arguments = "tests.support.ranks.two_ranks_sharded", (*arguments[:2], str(out), *arguments[2:])
    ended = run_ranks(script, out, *arguments, num_ranks=num_ranks)
    assert set(ended.statuses) == {0}, ended.stderr[-3000:]
    results = [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(num_ranks)]
    for result in results:
        result["metrics"] = {name: each for name, each in result["metrics"].items() if not name.startswith(CLOCKS)}
    return results


def weights(out: Path, rank: int = 0) -> dict[str, torch.Tensor]:
    """Return what an engine gets: under `fsdp2` in the type that is computed with."""
    found = torch.load(out / f"weights{rank}.pt", map_location="cpu", weights_only=True)
    return {name: tensor.float() for name, tensor in found.items()}


def whole(path: Path) -> dict[str, Any]:
    """Return the state that one process, or each rank of `ddp`, resumes from."""
    checkpoint = WholeCheckpointIO().load_checkpoint(path, weights_only=True)
    return {name: checkpoint[name] for name in ("state_dict", "optimizer_states")}


def launch(out: Path, *arguments: str) -> dict[str, float]:
    """Run it as a user would: Lightning starts rank 1; return the last iteration's metrics."""
    out.mkdir()
    script = ROOT / "tests/support/ranks/two_ranks_sharded.py"
    command = [sys.executable, str(script), *arguments[:2], str(out), *arguments[2:]]
    said = out / "said"
    try:
        with said.open("w") as file:
            done = subprocess.run(command, env=with_root(os.environ), stdout=file, stderr=file, timeout=280)
    finally:  # if the time is up, too
        print(f"What the run {out.name} said last:\n{said.read_text()[-5000:]}")
    assert done.returncode == 0
    return json.loads((out / "rank0.json").read_text())["metrics"]


@pytest.mark.gpu
@pytest.mark.timeout(900)  # three starts of two engines
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("options", ["gpu full checkpointing", "gpu lora"])
def test_two_gpus_learn_sharded_as_they_do_whole(options: str, prompts_path: str, tmp_path: Path) -> None:
    """In bfloat16, whose rounding makes other texts: both strategies' engines agree with the policy alike."""
    shape = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
    policy = str(save_policy(tmp_path / "policy", initializer_range=0.05, **shape))
    ddp, fsdp2, resumed = (tmp_path / name for name in ("ddp", "fsdp2", "resumed"))
    metrics = [launch(out, policy, prompts_path, out.name, options) for out in (ddp, fsdp2)]
    assert all(each["mismatch/kl"] < 0.01 for each in metrics), metrics
    torch.testing.assert_close(weights(fsdp2, 1), weights(fsdp2, 0), atol=0, rtol=0)
    torch.testing.assert_close(weights(fsdp2), weights(ddp), atol=0.03, rtol=0.03)  # steps of AdamW at 3e-3
    launch(resumed, policy, prompts_path, "fsdp2", options, str(fsdp2 / "within.ckpt"))
    torch.testing.assert_close(weights(resumed), weights(fsdp2), atol=0.01, rtol=0.01)


@pytest.mark.vllm
@pytest.mark.slow
def test_sharded_ranks_write_and_learn_what_whole_ones_do(policy_path: str, prompts_path: str, tmp_path: Path) -> None:
    ddp, fsdp2, resumed = (tmp_path / name for name in ("ddp", "fsdp2", "resumed"))
    expected = run(ddp, policy_path, prompts_path, "ddp")
    found = run(fsdp2, policy_path, prompts_path, "fsdp2")
    for rank in (0, 1):
        assert found[rank]["rollouts"] == expected[rank]["rollouts"]
        assert found[rank]["metrics"] == pytest.approx(expected[rank]["metrics"], abs=1e-4)
        torch.testing.assert_close(weights(fsdp2, rank), weights(ddp), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(whole(fsdp2 / "end.ckpt"), whole(ddp / "end.ckpt"), atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(weights(fsdp2, 1), weights(fsdp2, 0), atol=0, rtol=0)
    exported = load_policy(str(export_policy(str(fsdp2 / "end.ckpt"), str(tmp_path / "hf"), dtype="float32")))
    assert all(torch.equal(parameter, weights(fsdp2)[name]) for name, parameter in exported.named_parameters())
    # The rest of the run once more, then what the other strategy saved.
    run(resumed, policy_path, prompts_path, "fsdp2", "", str(fsdp2 / "within.ckpt"), str(ddp / "end.ckpt"))
    torch.testing.assert_close(weights(resumed), weights(fsdp2), atol=0, rtol=0)
    torch.testing.assert_close(whole(resumed / "loaded.ckpt"), whole(ddp / "end.ckpt"), atol=0, rtol=0)


@pytest.mark.vllm
@pytest.mark.slow
def test_a_sharded_teacher_of_half_precision_teaches_what_a_whole_one_does(
    policy_path: str, prompts_path: str, tmp_path: Path
) -> None:
    """Wider than its policy, of another family; in bfloat16, whose rounding differs between the strategies."""
    save_policy(tmp_path / "teacher", "llama", seed=1, hidden_size=96, num_hidden_layers=1)
    ddp, fsdp2 = (tmp_path / name for name in ("ddp", "fsdp2"))
    expected, found = (run(out, policy_path, prompts_path, out.name, "taught") for out in (ddp, fsdp2))
    assert [each["teacher"] for each in expected] == [["torch.bfloat16", "Parameter"]] * 2
    assert [each["teacher"] for each in found] == [["torch.bfloat16", "DTensor"]] * 2
    divergences = [each["metrics"]["train/divergence"] for each in (*expected, *found)]
    assert divergences == pytest.approx([divergences[0]] * 4, rel=0.02)
    torch.testing.assert_close(weights(fsdp2, 1), weights(fsdp2, 0), atol=0, rtol=0)
    torch.testing.assert_close(weights(fsdp2), weights(ddp), atol=0.03, rtol=0.03)  # steps of AdamW at 3e-3


def save_judge(path: Path) -> None:
    """Save a reward model whose scores differ between responses."""
    from transformers import Qwen2Config, Qwen2ForSequenceClassification

    sizes = {"vocab_size": len(WORDS), "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    config = Qwen2Config(**sizes, num_attention_heads=2, num_key_value_heads=2, num_labels=1, initializer_range=0.5)
    torch.manual_seed(0)
    Qwen2ForSequenceClassification(config).save_pretrained(path)
    save_tokenizer(path)


def samples(ranks: list[dict[str, Any]], *, last: bool = False) -> list[Any]:
    """Return tokens and rewards of all ranks' responses, or of those in the second of two iterations."""
    written = (rank["rollouts"][len(rank["rollouts"]) // 2 * last :] for rank in ranks)
    return sorted(rollout for rollouts in written for rollout in rollouts)


@pytest.mark.vllm
@pytest.mark.slow
def test_sharded_ppo_is_one_process_and_goes_on_in_one_and_on_ranks_that_do_not_share(
    policy_path: str, prompts_path: str, tmp_path: Path
) -> None:
    """A critic of its own, a reward model; the second of two iterations is repeated from what the first one saved."""
    save_judge(tmp_path / "judge")

    def fit(name: str, strategy: str, num_ranks: int, *ckpt_path: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        found = run(tmp_path / name, policy_path, prompts_path, strategy, "ppo", *ckpt_path, num_ranks=num_ranks)
        return found, whole(tmp_path / name / "end.ckpt")

    sharded, end = fit("sharded", "fsdp2", 2)
    alone, expected = fit("alone", "auto", 1)
    assert samples(sharded) == samples(alone)
    assert len({reward for _, reward in samples(sharded)}) > 4
    torch.testing.assert_close(end, expected, atol=1e-4, rtol=1e-3)  # the critic and the optimizer, too
    for name, strategy, num_ranks in (("one", "auto", 1), ("ddp", "ddp", 2)):
        rest, resumed = fit(name, strategy, num_ranks, str(tmp_path / "sharded/epoch=0.ckpt"))
        assert samples(rest) == samples(sharded, last=True)
        torch.testing.assert_close(resumed, end, atol=1e-4, rtol=1e-3)


@pytest.mark.vllm
def test_a_rank_that_dies_within_a_pass_ends_the_run(policy_path: str, prompts_path: str, tmp_path: Path) -> None:
    arguments = (policy_path, prompts_path, str(tmp_path), "fsdp2", "die")
    ended = run_ranks("tests.support.ranks.two_ranks_sharded", tmp_path, *arguments)
    assert ended.statuses == [1, 3]
    assert "rank 1 has died: its process ended" in ended.stderr
