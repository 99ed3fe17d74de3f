"""Runs whose two ranks are one engine: each learns from its own prompts, which both write."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from tests.support.ranks.rank_processes import Ended, run_ranks
from tlt_lightning.checks import check_engine_ranks


def run(policy: str, prompts: str, out: Path, tensor_parallel: int, mode: str = "plain", num_ranks: int = 2) -> Ended:
    out.mkdir()
    arguments = (policy, prompts, str(out), str(tensor_parallel), mode, str(num_ranks))
    return run_ranks("tests.support.ranks.two_ranks_tensor_parallel", out, *arguments, num_ranks=num_ranks, timeout=250)


def read(out: Path, num_ranks: int = 2) -> list[dict[str, Any]]:
    return [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(num_ranks)]


def samples(ranks: list[dict[str, Any]]) -> list[list[Any]]:
    """Prompt, tokens and reward of all ranks' responses."""
    return sorted(rollout for rank in ranks for rollout in rank["rollouts"])


@pytest.mark.vllm
def test_two_ranks_learn_from_what_one_engine_writes(policy_path: str, prompts_path: str, tmp_path: Path) -> None:
    ended = run(policy_path, prompts_path, tmp_path / "together", 2, "ddp")
    assert ended.statuses == [0, 0], ended.stderr[-3000:]
    first, second = read(tmp_path / "together")
    assert first["weights"] == second["weights"]
    assert first["metrics"] == second["metrics"]
    assert first["metrics"]["mismatch/logp_abs_diff"] < 1e-4
    assert len(first["rollouts"]) == len(second["rollouts"]) == 2 * 2 * 4
    in_an_iteration = [{index for index, *_ in rank["rollouts"][8:]} for rank in (first, second)]
    assert not in_an_iteration[0] & in_an_iteration[1]
    ended = run(policy_path, prompts_path, tmp_path / "apart", 1)
    assert ended.statuses == [0, 0], ended.stderr[-3000:]
    for together, apart in zip((first, second), read(tmp_path / "apart"), strict=True):
        assert together["rollouts"] == apart["rollouts"]
        assert together["weights"] == pytest.approx(apart["weights"], rel=1e-5, abs=1e-4)


@pytest.mark.vllm
@pytest.mark.slow
def test_two_engines_of_two_ranks_that_share_a_policy_do_what_one_process_does(
    policy_path: str, prompts_path: str, tmp_path: Path
) -> None:
    alone, shared = tmp_path / "alone", tmp_path / "shared"
    for out, tensor_parallel, mode, num_ranks in ((alone, 1, "alone", 1), (shared, 2, "fsdp2", 4)):
        ended = run(policy_path, prompts_path, out, tensor_parallel, mode, num_ranks)
        assert set(ended.statuses) == {0}, ended.stderr[-3000:]
    (expected,), found = read(alone, 1), read(shared, 4)
    assert samples(found) == samples([expected])
    for rank in found:
        assert rank["weights"] == pytest.approx(expected["weights"], rel=1e-5, abs=1e-4)
        assert rank["metrics"]["mismatch/logp_abs_diff"] < 1e-4


@pytest.mark.vllm
def test_a_rank_of_an_engine_that_dies_ends_the_run(policy_path: str, prompts_path: str, tmp_path: Path) -> None:
    ended = run(policy_path, prompts_path, tmp_path / "dead", 2, "die")
    assert ended.statuses == [1, 3]
    assert "rank 1 has died: its process ended" in ended.stderr


def test_devices_that_make_no_whole_engines_are_refused() -> None:
    check_engine_ranks(2, SimpleNamespace(num_devices=4))
    with pytest.raises(MisconfigurationException, match=r"`engine.tensor_parallel` 2 does not divide the 3 devices"):
        check_engine_ranks(2, SimpleNamespace(num_devices=3))
