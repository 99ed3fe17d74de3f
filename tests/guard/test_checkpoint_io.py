import multiprocessing
import resource
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.copied_in_checkpoint import train
from tlt_lightning.__main__ import sentence_of
from tlt_lightning.guard.checkpoint_io import WholeCheckpointIO, remove_leftovers

CONTEXT = multiprocessing.get_context("forkserver")


def run(folder: Path, copies: Path | None = None) -> int | None:
    """Train in a process of its own and return its exit status."""
    folder.mkdir(exist_ok=True)
    process = CONTEXT.Process(target=train, args=(str(folder), None if copies is None else str(copies)))
    process.start()
    process.join(250)
    process.kill()
    return process.exitcode


@pytest.mark.slow
def test_last_names_a_whole_checkpoint_wherever_a_kill_falls(tmp_path: Path) -> None:
    assert run(tmp_path / "run", copies=tmp_path / "copies") == 0
    copies, epochs = [*(tmp_path / "copies").iterdir()], set()
    assert len(copies) > 10
    for folder in copies:
        last = folder / "checkpoints" / "last.ckpt"
        whole = {path.name for path in last.parent.glob("epoch=*.ckpt") if torch.load(path, weights_only=True)}
        if whole <= {"epoch=0.ckpt"} and not last.is_symlink():
            continue  # before the first link
        assert not last.readlink().is_absolute()  # it names a file of this copy
        epochs.add(torch.load(last, weights_only=True)["epoch"])
    assert epochs == {0, 1}


@pytest.mark.slow
def test_a_run_killed_while_it_writes_a_checkpoint_is_resumed_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    part = tmp_path / "checkpoints" / ".epoch=1.ckpt.part"
    part.write_text("half")
    assert run(tmp_path) == 0
    assert not part.exists()
    names = sorted(path.name for path in part.parent.iterdir())
    assert names == ["epoch=1.ckpt", "last.ckpt"]


def test_a_checkpoint_that_cannot_be_written_is_an_error_with_path_and_reason(tmp_path: Path) -> None:
    io, path = WholeCheckpointIO(), tmp_path / "epoch=1.ckpt"
    io.save_checkpoint({"pytorch-lightning_version": "2", "weights": torch.zeros(3)}, path)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limit[1]))  # the operating system refuses to write more
    try:
        with pytest.raises(RuntimeError, match=r"epoch=1.ckpt' could not be written: .*File too large") as raised:
            io.save_checkpoint({"weights": torch.zeros(100_000)}, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert sentence_of(raised.value) == str(raised.value)  # needs no traceback
    assert [file.name for file in tmp_path.iterdir()] == ["epoch=1.ckpt"]
    assert len(io.load_checkpoint(path, weights_only=True)["weights"]) == 3  # the earlier one is as it was


def test_a_folder_that_may_not_be_written_to_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file stands where the folder should be")
    with pytest.raises(RuntimeError, match=r"could not be written: .*File exists"):
        WholeCheckpointIO().save_checkpoint({}, tmp_path / "checkpoints" / "epoch=1.ckpt")


def test_what_cannot_be_read_is_named_with_what_lies_beside_it(tmp_path: Path) -> None:
    io = WholeCheckpointIO()
    io.save_checkpoint({"pytorch-lightning_version": "2", "weights": torch.zeros(1000)}, tmp_path / "epoch=1.ckpt")
    beside = r"Beside it lie .*epoch=1.ckpt\."
    (tmp_path / "epoch=2.ckpt").touch()
    for content in (b"", (tmp_path / "epoch=1.ckpt").read_bytes()[:2000], b'{"prompt": "1 + 1"}'):
        (tmp_path / "epoch=2.ckpt").write_bytes(content)
        with pytest.raises(ValueError, match=f"epoch=2.ckpt' is not a complete checkpoint .*{beside}"):
            io.load_checkpoint(tmp_path / "epoch=2.ckpt", weights_only=True)
    (tmp_path / "epoch=2.ckpt").write_bytes((tmp_path / "epoch=1.ckpt").read_bytes().replace(b"data.pkl", b"data.pki"))
    with pytest.raises(ValueError, match=f"epoch=2.ckpt' cannot be read: .*{beside}"):
        io.load_checkpoint(tmp_path / "epoch=2.ckpt", weights_only=True)
    with pytest.raises(ValueError, match=r"is not a complete checkpoint .* or a folder"):
        io.load_checkpoint(tmp_path)
    for content in ({"weights": torch.zeros(3)}, [1, 2]):
        torch.save(content, tmp_path / "epoch=2.ckpt")
        with pytest.raises(ValueError, match=f"cannot be read: no Trainer has written it; .*{beside}"):
            io.load_checkpoint(tmp_path / "epoch=2.ckpt", weights_only=True)
    (tmp_path / "last.ckpt").symlink_to("epoch=2.ckpt")
    whole = (tmp_path / "epoch=2.ckpt").read_bytes()
    for content in (whole, whole[:300]):  # what is linked to lies beside the link, and is what cannot be read
        (tmp_path / "epoch=2.ckpt").write_bytes(content)
        with pytest.raises(ValueError, match=r"last.ckpt' .*Beside it lie [^,]*epoch=1.ckpt\."):
            io.load_checkpoint(tmp_path / "last.ckpt", weights_only=True)
    (tmp_path / "epoch=2.ckpt").unlink()
    with pytest.raises(FileNotFoundError, match=f"epoch=2.ckpt' does not exist, or links to what does not. {beside}"):
        io.load_checkpoint(tmp_path / "epoch=2.ckpt")
    with pytest.raises(FileNotFoundError, match=f"last.ckpt' does not exist, or links to what does not. {beside}"):
        io.load_checkpoint(tmp_path / "last.ckpt")


def test_only_what_was_left_half_written_is_removed(tmp_path: Path) -> None:
    for name in ("epoch=1.ckpt", ".epoch=2.ckpt.part", "notes"):
        (tmp_path / name).touch()
    remove_leftovers(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"epoch=1.ckpt", "notes"}


@pytest.fixture
def write(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Nothing is written before it is set."""
    may_write, save = threading.Event(), torch.save

    def later(*arguments: Any) -> None:
        assert may_write.wait(250)
        save(*arguments)

    monkeypatch.setattr(torch, "save", later)
    return may_write


def save_behind(io: WholeCheckpointIO, folder: Path, epoch: int, state: Any) -> None:
    """What ModelCheckpoint has done after an iteration."""
    with io.behind():
        io.save_checkpoint({"state": state}, folder / f"epoch={epoch}.ckpt")
    io.link(str(folder / f"epoch={epoch}.ckpt"), str(folder / "last.ckpt"))
    if epoch:
        io.remove_checkpoint(folder / f"epoch={epoch - 1}.ckpt")


def test_a_checkpoint_written_beside_the_run_is_of_the_moment_it_was_saved(
    tmp_path: Path, write: threading.Event
) -> None:
    io, weight = WholeCheckpointIO(), torch.zeros(3)
    save_behind(io, tmp_path, 0, {"weight": weight, "tied": weight})
    weight += 1
    assert not list(tmp_path.glob("*.ckpt"))  # no link to what is not there
    write.set()
    save_behind(
        io, tmp_path, 1, {"weight": weight, "tied": weight}
    )  # waits for the one before: its memory is used again
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["state"]["weight"].tolist() in ([0] * 3, [1] * 3)
    io.wait()
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)["state"]
    assert saved["weight"].tolist() == [1, 1, 1]
    assert saved["weight"].data_ptr() == saved["tied"].data_ptr()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["epoch=1.ckpt", "last.ckpt"]


@pytest.mark.parametrize(
    "hear", [WholeCheckpointIO.wait, WholeCheckpointIO.teardown, lambda io: check_until_it_is_heard(io)]
)
def test_one_that_could_not_be_written_leaves_the_one_before_and_its_link(
    hear: Callable[[WholeCheckpointIO], None], tmp_path: Path
) -> None:
    io = WholeCheckpointIO()
    save_behind(io, tmp_path, 0, torch.zeros(3))
    io.wait()
    (tmp_path / "epoch=1.ckpt").mkdir()
    save_behind(io, tmp_path, 1, torch.ones(3))
    with pytest.raises(RuntimeError, match=r"epoch=1.ckpt' could not be written: .*s a directory"):
        hear(io)
    io.check()  # it was heard of
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["state"].tolist() == [0, 0, 0]


def check_until_it_is_heard(io: WholeCheckpointIO) -> None:
    while True:
        io.check()


def test_the_next_save_hears_of_the_failure_of_the_one_before(tmp_path: Path) -> None:
    io = WholeCheckpointIO()
    (tmp_path / "epoch=0.ckpt").mkdir()
    save_behind(io, tmp_path, 0, torch.zeros(3))
    with pytest.raises(RuntimeError, match=r"epoch=0.ckpt' could not be written"):
        save_behind(io, tmp_path, 1, torch.ones(3))


def test_what_no_file_can_hold_leaves_none(tmp_path: Path) -> None:
    state = {"weights": torch.zeros(3), "callbacks": {"Fine": {"a": 1}, "Mine": {"f": lambda: None}}}
    with pytest.raises(RuntimeError, match=r"epoch=1\.ckpt' could not be written: Can't .*lambda"):
        WholeCheckpointIO().save_checkpoint(state, tmp_path / "epoch=1.ckpt")
    assert not list(tmp_path.iterdir())
