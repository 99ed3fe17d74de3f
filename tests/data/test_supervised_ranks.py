"""Given texts are learned by two ranks, whole or sharded, as by one."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.support.ranks.rank_processes import run_ranks


def run(policy: str, out: Path, strategy: str, ckpt: Path | None = None) -> list[dict[str, Tensor]]:
    """Return what each rank ends with: weights, and losses of the last epoch."""
    out.mkdir()
    num_ranks = 1 if strategy == "auto" else 2
    arguments = ("tests.support.ranks.two_ranks_texts", out, policy, str(out), strategy, str(ckpt or ""))
    ended = run_ranks(*arguments, num_ranks=num_ranks)
    assert set(ended.statuses) == {0}, ended.stderr[-3000:]
    return [torch.load(out / f"weights{rank}.pt", weights_only=True) for rank in range(num_ranks)]


def learned(results: dict[str, Tensor]) -> dict[str, Tensor]:
    """Leave out the loss of held-out texts, seven or six, and the head, which each rank teaches with its own texts."""
    return {name: value for name, value in results.items() if name != "val/loss" and not name.startswith("head.")}


@pytest.fixture(scope="module")
def alone(policy_path: str, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Tensor]]:
    """What one rank ends with, and what it ends with when it has gone on for an epoch."""
    folder = tmp_path_factory.mktemp("alone")
    (ended,) = run(policy_path, folder / "run", "auto")
    (longer,) = run(policy_path, folder / "longer", "auto", folder / "run/checkpoints/last.ckpt")
    return [learned(ended), learned(longer)]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_two_ranks_learn_what_one_does_and_go_on(
    strategy: str, policy_path: str, tmp_path: Path, alone: list[dict[str, Tensor]]
) -> None:
    """Each held-out text counts, but a remainder that the ranks cannot share. A head learns along, the same on both."""
    first, second = run(policy_path, tmp_path / "two", strategy)
    torch.testing.assert_close(first, second, atol=0, rtol=0)
    assert any(name.startswith("head.") for name in first)
    assert (first["model.norm.weight"] == 1).all()  # frozen
    torch.testing.assert_close(learned(first), alone[0], atol=1e-4, rtol=1e-4)
    on, _ = run(policy_path, tmp_path / "on", strategy, tmp_path / "two/checkpoints/last.ckpt")
    torch.testing.assert_close(learned(on), alone[1], atol=1e-4, rtol=1e-4)
