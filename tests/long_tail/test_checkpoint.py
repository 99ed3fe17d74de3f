"""What a checkpoint holds of drafters on several workers, and who goes on from what."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.rank_processes import run_ranks
from tlt_lightning.long_tail.checkpoint import state_of_rank


def test_rank_zero_is_handed_what_another_holds_and_does_not_wait_for_one_that_died(tmp_path: Path) -> None:
    ended = run_ranks("tests.support.two_ranks_gather", tmp_path, str(tmp_path / "store"), timeout=100)
    assert ended.statuses == [0, 0], ended.stderr


@pytest.fixture
def saved() -> dict[str, Any]:
    """A checkpoint of two workers."""

    def own(rank: int) -> dict[str, Any]:
        return {"optimizer": f"optimizer {rank}", "buffer": {"newest": [f"states {rank}"], "held_out": []}}

    others = [{"trainer": own(1), "drift": "drift 1"}]
    return {"trainer": {"weights": "weights", **own(0)}, "drift": "drift 0", "history": {1: {}}, "others": others}


def test_each_rank_goes_on_from_its_own(saved: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    for rank in (0, 1):
        state = state_of_rank(saved, rank, world_size=2)
        assert state == {
            "trainer": {
                "weights": "weights",
                "optimizer": f"optimizer {rank}",
                "buffer": {"newest": [f"states {rank}"], "held_out": []},
            },
            "drift": f"drift {rank}",
            "history": {1: {}},
            "others": [],  # Lightning copies what is in here
        }
    assert not caplog.records


def test_a_new_rank_begins_with_the_optimizer_of_rank_zero(
    saved: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    state_of_rank(saved, 0, world_size=3)
    assert "on 2 workers, the run has 3" in caplog.text
    state = state_of_rank(saved, 2, world_size=3)
    assert state["trainer"] == {
        "weights": "weights",
        "optimizer": "optimizer 0",
        "buffer": {"newest": [], "held_out": []},
    }
    assert state["drift"] == "drift 0"


def test_a_run_of_fewer_workers_says_that_it_is_not_the_same(
    saved: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    assert state_of_rank(saved, 0, world_size=1)["trainer"] == saved["trainer"]
    assert "on 2 workers, the run has 1" in caplog.text
