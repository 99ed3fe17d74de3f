"""Checkpoints of sharded runs: rows of several ranks, written behind the run, read on any number of them."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tlt_lightning.guard import checkpoint_io
from tlt_lightning.guard.checkpoint_io import WholeCheckpointIO
from tlt_lightning.guard.parts import TOKEN
from tlt_lightning.guard.shards import SHARDS, check_together
from tlt_lightning.sharding.rows import Rows

WEIGHT = torch.arange(10.0).reshape(5, 2)


def state(rows: torch.Tensor) -> dict[str, Any]:
    """Return the part that `take_apart` makes of a model of one weight and its optimizer on a rank."""
    optimizer = {"state": {0: {"exp_avg": {"rows": -rows}, "step": torch.tensor(3.0)}}, "param_groups": [{"lr": 0.1}]}
    return {"state_dict": {"weight": {"rows": rows}}, "optimizer_states": [optimizer]}


def checkpoint() -> dict[str, Any]:
    return {"pytorch-lightning_version": "2", "epoch": 7, TOKEN: "token", SHARDS: 2, **state(WEIGHT[:3])}


def part_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.ranks") / "1-token.pt"


def test_the_checkpoint_appears_once_all_shards_are_there(tmp_path: Path) -> None:
    first, second, path = WholeCheckpointIO(0), WholeCheckpointIO(1), tmp_path / "a.ckpt"
    with first.behind():
        first.save_checkpoint(checkpoint(), path)
    assert not path.exists()
    with second.behind():
        second.save_part({SHARDS: state(WEIGHT[3:])}, part_of(path))
    second.wait()
    first.wait()
    with pytest.raises(ValueError, match="is of a sharded run: give it to a Trainer"):
        check_together(torch.load(path, weights_only=True))
    for io in (first, second):  # of `ddp`, or one process
        whole = io.load_checkpoint(path, weights_only=True)
        assert torch.equal(whole["state_dict"]["weight"], WEIGHT)
        assert torch.equal(whole["optimizer_states"][0]["state"][0]["exp_avg"], -WEIGHT)
        assert (whole["optimizer_states"][0]["state"][0]["step"], whole["epoch"]) == (3, 7)
        assert SHARDS not in whole
    rows = first.load_checkpoint(path, weights_only=True, as_rows=True)["state_dict"]["weight"]
    assert isinstance(rows, Rows)
    for start, stop in ((0, 2), (2, 4), (4, 5), (5, 5)):  # of another number of ranks
        assert torch.equal(rows.between(start, stop), WEIGHT[start:stop])


def test_without_the_shards_of_a_rank_a_checkpoint_is_neither_written_nor_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    io, path = WholeCheckpointIO(0), tmp_path / "a.ckpt"
    with io.behind():
        io.save_checkpoint(checkpoint(), path)
    with pytest.raises(RuntimeError, match=r"shards of other ranks have not come.*1-token.pt"):
        io.wait(patience=0.0)  # after an error, which may be the other rank's
    assert not path.exists()
    monkeypatch.setattr(checkpoint_io, "_PATIENCE", 0.0)
    with pytest.raises(RuntimeError, match="of a file system that they share"):
        io.save_checkpoint(checkpoint(), path)
    torch.save(checkpoint(), path)  # copied without its folder
    with pytest.raises(FileNotFoundError, match=r"is of 2 shards, and those of ranks \[1\] are not beside it"):
        io.load_checkpoint(path, weights_only=True)
