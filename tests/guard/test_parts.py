"""What ranks have of their own: whole beside the checkpoint, gone with it, found again wherever it is."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import Strategy

from tlt_lightning.guard.checkpoint_io import WholeCheckpointIO, remove_leftovers
from tlt_lightning.guard.parts import OWN, save_with_parts


class Ranks:
    """Two ranks that save one after the other, the second first: rank zero begins when all parts are there."""

    def __init__(self) -> None:
        self.num_saves = 0
        self.ios = [WholeCheckpointIO(rank) for rank in (0, 1)]
        self.met: list[set[str]] = []
        """What is there where ranks wait for each other."""

    def save(self, path: Path, epoch: int, *, interrupted: bool = False) -> None:
        self.num_saves += 1
        for rank in (1, 0):
            strategy: Any = SimpleNamespace(
                is_global_zero=rank == 0,
                checkpoint_io=self.ios[rank],
                reduce_boolean_decision=lambda decision, all: not all,  # rank zero has nothing to write
                broadcast=lambda token: f"token{self.num_saves}",
                barrier=lambda name: self.met.append(names(path.parent)),
            )
            trainer: Any = SimpleNamespace(strategy=strategy, world_size=2, global_rank=rank, interrupted=interrupted)
            checkpoint = {"pytorch-lightning_version": "2", "epoch": epoch, OWN: {"drafter": torch.full((2,), rank)}}
            save_with_parts(trainer, checkpoint, path)

    def load(self, path: Path) -> list[list[int]]:
        return [io.load_checkpoint(path, weights_only=True)[OWN]["drafter"].tolist() for io in self.ios]


def names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def test_each_rank_reads_its_own_and_overwriting_leaves_no_old_parts(tmp_path: Path) -> None:
    ranks, path = Ranks(), tmp_path / "last.ckpt"
    for epoch in (0, 1):
        ranks.save(path, epoch)
        assert ranks.load(path) == [[0, 0], [1, 1]]
    assert names(tmp_path) == {"last.ckpt", "last.ckpt.ranks", "last.ckpt.ranks/1-token2.pt"}
    assert ranks.met[:2] == [{"last.ckpt.ranks", "last.ckpt.ranks/1-token1.pt"}] * 2  # parts, and no checkpoint yet
    assert len(ranks.met) == 4


def test_parts_go_with_their_checkpoint(tmp_path: Path) -> None:
    ranks = Ranks()
    for epoch in (0, 1):
        ranks.save(tmp_path / f"epoch={epoch}.ckpt", epoch)
    ranks.ios[0].remove_checkpoint(tmp_path / "epoch=0.ckpt")
    assert names(tmp_path) == {"epoch=1.ckpt", "epoch=1.ckpt.ranks", "epoch=1.ckpt.ranks/1-token2.pt"}
    (tmp_path / "last.ckpt").symlink_to("epoch=1.ckpt")
    shutil.copy(tmp_path / "epoch=1.ckpt", tmp_path / "best.ckpt")  # under another name beside it
    assert ranks.load(tmp_path / "last.ckpt") == ranks.load(tmp_path / "best.ckpt") == [[0, 0], [1, 1]]
    (tmp_path / "elsewhere").mkdir()
    shutil.copy(tmp_path / "epoch=1.ckpt", tmp_path / "elsewhere" / "alone.ckpt")
    assert ranks.load(tmp_path / "elsewhere" / "alone.ckpt") == [[0, 0], [0, 0]]


def test_a_checkpoint_that_is_cut_off_leaves_the_one_before_with_its_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ranks, path = Ranks(), tmp_path / "last.ckpt"
    ranks.save(path, 0)
    with monkeypatch.context() as patch:
        patch.setattr(Strategy, "save_checkpoint", lambda *_: None)  # killed after the parts
        ranks.save(path, 1)
        ranks.save(tmp_path / "other.ckpt", 1)
    assert ranks.load(path) == [[0, 0], [1, 1]]
    assert "last.ckpt.ranks/1-token1.pt" in names(tmp_path)
    (tmp_path / "last.ckpt.ranks" / ".1-token3.pt.part").touch()
    remove_leftovers(tmp_path)
    assert names(tmp_path) == {
        "last.ckpt",
        "last.ckpt.ranks",
        "last.ckpt.ranks/1-token1.pt",
        "last.ckpt.ranks/1-token2.pt",  # until the checkpoint is written again, or removed
    }
    assert "other.ckpt.ranks" in caplog.text


def test_after_an_error_no_rank_waits_for_another(tmp_path: Path) -> None:
    ranks = Ranks()
    ranks.save(tmp_path / "error.ckpt", 0, interrupted=True)
    assert names(tmp_path) == {"error.ckpt"}
    assert ranks.load(tmp_path / "error.ckpt") == [[0, 0], [0, 0]]
