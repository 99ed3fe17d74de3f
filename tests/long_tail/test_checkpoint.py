"""What a checkpoint holds of drafters on several workers, and who goes on from what."""

from typing import Any

import pytest

from tlt_lightning.long_tail.checkpoint import from_checkpoint, to_checkpoint

NUM_WORKERS = 2


def state_of(rank: int) -> dict[str, Any]:
    buffer = {"newest": [f"states {rank}"], "held_out": []}
    trainer = {"weights": "weights", "optimizer": f"optimizer {rank}", "buffer": buffer}
    return {"trainer": trainer, "drift": f"drift {rank}", "history": {1: {}}}


def saved(rank: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the file has that all ranks read, and what `rank` has of its own."""
    state = state_of(0)
    to_checkpoint(state, 0, NUM_WORKERS)
    return state, to_checkpoint(state_of(rank), rank, NUM_WORKERS)


def test_each_rank_goes_on_from_its_own(caplog: pytest.LogCaptureFixture) -> None:
    for rank in (0, 1):
        state, own = saved(rank)
        assert "optimizer" not in state["trainer"]
        assert "weights" not in own["trainer"]
        joined = from_checkpoint(state, own, rank, NUM_WORKERS)
        assert joined == {**state_of(rank), "num_workers": NUM_WORKERS}
    assert not caplog.records


def test_a_new_rank_begins_with_the_optimizer_of_rank_zero(caplog: pytest.LogCaptureFixture) -> None:
    from_checkpoint(*saved(0), rank=0, world_size=3)
    assert "on 2 workers, the run has 3" in caplog.text
    state = from_checkpoint(*saved(0), rank=2, world_size=3)
    assert len(caplog.records) == 1
    assert state["trainer"] == {
        "weights": "weights",
        "optimizer": "optimizer 0",
        "buffer": {"newest": [], "held_out": []},
    }
    assert state["drift"] == "drift 0"


def test_a_rank_whose_part_is_lost_says_so_and_begins_like_a_new_one(caplog: pytest.LogCaptureFixture) -> None:
    state = from_checkpoint(*saved(0), rank=1, world_size=NUM_WORKERS)
    assert "state of rank 1 is not beside the checkpoint" in caplog.text
    assert state["trainer"]["buffer"] == {"newest": [], "held_out": []}


def test_a_run_of_fewer_workers_says_that_it_is_not_the_same(caplog: pytest.LogCaptureFixture) -> None:
    assert from_checkpoint(*saved(0), rank=0, world_size=1)["trainer"] == state_of(0)["trainer"]
    assert "on 2 workers, the run has 1" in caplog.text
