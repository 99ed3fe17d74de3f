import threading
import time

import pytest
import torch
from safetensors.torch import load_file

from tlt_lightning.long_tail import snapshots
from tlt_lightning.long_tail.snapshots import SnapshotWriter, list_snapshots, load_snapshot


class Disk:
    """Stands in for the disk: writes begin and end when the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.began, self.may_write = threading.Event(), threading.Event()
        self._save_file = snapshots.save_file
        monkeypatch.setattr(snapshots, "save_file", self.save_file)

    def save_file(self, tensors, path, metadata) -> None:
        path.write_bytes(b"half")
        self.began.set()
        assert self.may_write.wait(10)
        self._save_file(tensors, path, metadata)


@pytest.fixture
def disk(monkeypatch):
    return Disk(monkeypatch)


def tensors(value: float = 1.0) -> dict[str, torch.Tensor]:
    value = float(value)
    return {
        "fc.weight": torch.full((3, 5), value, dtype=torch.bfloat16),
        "norm.weight": torch.full((3,), value, requires_grad=True),
        "columns": torch.full((4, 2), value).T,
    }


def names(path) -> list[str]:
    return sorted(item.name for item in path.iterdir())


def test_a_snapshot_is_read_back_as_it_was(tmp_path):
    saved = tensors(0.1)
    with SnapshotWriter(tmp_path / "made") as writer:
        writer.save(saved.items(), version=7)
    (path,) = list_snapshots(tmp_path / "made")
    assert path.name == "drafter-00000007.safetensors"
    loaded, version = load_snapshot(path)
    assert version == 7
    assert loaded.keys() == saved.keys() == load_file(path).keys()
    for name, tensor in saved.items():
        assert torch.equal(loaded[name], tensor)
        assert loaded[name].dtype == tensor.dtype


def test_a_snapshot_holds_the_values_of_the_call_not_of_the_write(tmp_path, disk):
    saved = tensors(1.0)
    writer = SnapshotWriter(tmp_path)
    writer.save(saved.items(), version=0)
    assert disk.began.wait(10)
    with torch.no_grad():
        for tensor in saved.values():
            tensor.add_(1)
    disk.may_write.set()
    writer.close()
    loaded, _ = load_snapshot(list_snapshots(tmp_path)[0])
    assert all((tensor == 1).all() for tensor in loaded.values())


def test_the_caller_does_not_wait_for_the_disk_and_no_half_written_file_is_seen(tmp_path, disk):
    with SnapshotWriter(tmp_path) as writer:
        writer.save(tensors().items(), version=0)
        assert disk.began.wait(10)  # the call returned while the write still stands
        assert list_snapshots(tmp_path) == []
        assert 0 < writer.milliseconds < 1000
        disk.may_write.set()
        writer.wait()
        assert names(tmp_path) == ["drafter-00000000.safetensors"]


def test_a_reader_keeps_the_file_it_opened_when_that_version_is_written_again(tmp_path):
    with SnapshotWriter(tmp_path) as writer:
        writer.save(tensors(1).items(), version=0)
        writer.wait()
        (path,) = list_snapshots(tmp_path)
        contents = path.read_bytes()
        with path.open("rb") as reader:
            writer.save(tensors(2).items(), version=0)
            writer.wait()
            assert reader.read() == contents
    assert (load_snapshot(path)[0]["fc.weight"] == 2).all()


def test_the_newest_replaces_one_that_still_waits(tmp_path, disk):
    writer = SnapshotWriter(tmp_path, keep_last=9)
    writer.save(tensors(0).items(), version=0)
    assert disk.began.wait(10)
    for version in (1, 2, 3):
        writer.save(tensors(version).items(), version=version)
    disk.may_write.set()
    writer.close()
    assert [load_snapshot(path)[1] for path in list_snapshots(tmp_path)] == [0, 3]
    assert (load_snapshot(list_snapshots(tmp_path)[1])[0]["fc.weight"] == 3).all()
    assert (load_snapshot(list_snapshots(tmp_path)[0])[0]["fc.weight"] == 0).all()


def test_host_memory_is_used_again(tmp_path, monkeypatch):
    addresses = []
    save_file = snapshots.save_file

    def record(tensors, path, metadata):
        addresses.append(tensors["fc.weight"].data_ptr())
        save_file(tensors, path, metadata)

    monkeypatch.setattr(snapshots, "save_file", record)
    with SnapshotWriter(tmp_path) as writer:
        for version in range(4):
            writer.save(tensors(version).items(), version=version)
            writer.wait()
        writer.save([("fc.weight", torch.zeros(2, 2))], version=4)
    assert len(set(addresses[:4])) == 1
    assert load_snapshot(list_snapshots(tmp_path)[-1])[0]["fc.weight"].shape == (2, 2)


def test_only_the_last_written_are_kept(tmp_path):
    for versions in ((10, 11, 12), (3, 4)):  # a resumed run starts at an earlier version again
        with SnapshotWriter(tmp_path, keep_last=2) as writer:
            for version in versions:
                writer.save(tensors().items(), version=version)
                writer.wait()
            writer.save(tensors(5).items(), version=versions[-1])
        assert [load_snapshot(path)[1] for path in list_snapshots(tmp_path)] == list(versions[-2:])
    assert (load_snapshot(list_snapshots(tmp_path)[-1])[0]["fc.weight"] == 5).all()


@pytest.mark.parametrize("surfaces_at", ["save", "wait", "close"])
def test_a_failed_write_surfaces_at_the_next_call_once(tmp_path, monkeypatch, surfaces_at):
    def fail(tensors, path, metadata):
        path.write_bytes(b"half")
        raise OSError("No space left on device")

    writer = SnapshotWriter(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(snapshots, "save_file", fail)
        writer.save(tensors().items(), version=0)
        while not writer._error:
            time.sleep(0.001)
    calls = {"save": lambda: writer.save(tensors().items(), version=1), "wait": writer.wait, "close": writer.close}
    with pytest.raises(RuntimeError, match="could not be written") as error:
        calls[surfaces_at]()
    assert "No space left" in str(error.value.__cause__)
    assert names(tmp_path) == []
    if surfaces_at != "close":
        writer.save(tensors().items(), version=2)
        writer.close()
        assert names(tmp_path) == ["drafter-00000002.safetensors"]


def test_tensors_that_cannot_be_copied_leave_the_writer_usable(tmp_path):
    with SnapshotWriter(tmp_path) as writer:
        for _ in range(3):
            with pytest.raises(AttributeError):
                writer.save([("fc.weight", None)], version=0)
        writer.save(tensors().items(), version=1)
    assert [load_snapshot(path)[1] for path in list_snapshots(tmp_path)] == [1]


def test_closing_writes_what_is_left_ends_the_thread_and_may_be_repeated(tmp_path):
    writer = SnapshotWriter(tmp_path)
    writer.save(tensors().items(), version=0)
    writer.close()
    writer.close()
    assert len(list_snapshots(tmp_path)) == 1
    assert not writer._thread.is_alive()
    with pytest.raises(RuntimeError, match="is closed"):
        writer.save(tensors().items(), version=1)


def test_what_a_killed_process_left_half_written_is_removed(tmp_path):
    (tmp_path / "drafter-00000001.safetensors.partial").write_bytes(b"half")
    SnapshotWriter(tmp_path).close()
    assert names(tmp_path) == []


def test_keeping_none_is_refused(tmp_path):
    with pytest.raises(ValueError, match="`keep_last` must be at least 1, got 0"):
        SnapshotWriter(tmp_path, keep_last=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_from_a_gpu_the_caller_does_not_wait_and_the_values_are_those_of_the_call(tmp_path):
    tensor = torch.zeros(1 << 20, device="cuda")
    with SnapshotWriter(tmp_path) as writer:
        writer.save([("weight", tensor)], version=0)
        writer.wait()  # the page-locked memory exists from here on
        torch.cuda._sleep(500_000_000)  # cycles, a quarter of a second: the copy waits behind them
        tensor += 1
        writer.save([("weight", tensor)], version=1)
        assert writer.milliseconds < 50
        tensor += 1
    loaded, _ = load_snapshot(list_snapshots(tmp_path)[-1])
    assert (loaded["weight"] == 1).all()
