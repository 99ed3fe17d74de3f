"""What a checkpoint holds of drafters on several ranks, and who goes on from what."""

from typing import Any

import pytest

from tlt_lightning.long_tail.checkpoint import from_checkpoint, to_checkpoint

NUM_RANKS = 2


def state_of(rank: int) -> dict[str, Any]:
    buffer = {"newest": [f"states {rank}"], "held_out": []}
    trainer = {"weights": "weights", "optimizer": f"optimizer {rank}", "buffer": buffer}
    return {"trainer": trainer, "history": {1: {}}}


def saved(rank: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the file has that all ranks read, and what `rank` has of its own."""
    state = state_of(0)
    to_checkpoint(state, 0, NUM_RANKS)
    return state, to_checkpoint(state_of(rank), rank, NUM_RANKS)


def test_each_rank_goes_on_from_its_own(caplog: pytest.LogCaptureFixture) -> None:
    for rank in (0, 1):
        state, own = saved(rank)
        assert "optimizer" not in state["trainer"]
        assert "weights" not in own["trainer"]
        joined = from_checkpoint(state, own, rank)
        assert joined == {**state_of(rank), "num_workers": NUM_RANKS}
    assert not caplog.records


@pytest.mark.parametrize("rank", [1, 2])
def test_a_rank_without_a_part_begins_with_the_optimizer_of_rank_zero(
    rank: int, caplog: pytest.LogCaptureFixture
) -> None:
    state = from_checkpoint(*saved(0), rank=rank)
    assert f"state of rank {rank} is not beside the checkpoint, which 2 ranks wrote" in caplog.text
    assert state["trainer"] == {
        "weights": "weights",
        "optimizer": "optimizer 0",
        "buffer": {"newest": [], "held_out": []},
    }
