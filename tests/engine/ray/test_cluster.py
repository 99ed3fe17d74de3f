"""What is said before anything loads, and what a run leaves behind."""

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.common.cheap_engine import CheapEngine
from tests.support.ranks.rank_processes import ROOT, run_ranks, with_root
from tlt_lightning import RayEngine, TransformersEngine, VLLMEngine
from tlt_lightning.engine.ray import cluster as clusters
from tlt_lightning.engine.ray import remote_host

pytestmark = pytest.mark.ray


def processes_with(mark: str) -> list[str]:
    """Command lines of living processes in whose environment a mark is."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "environ").read_bytes() and (line := (folder / "cmdline").read_bytes()):
                found.append(line.replace(b"\0", b" ").decode())
        except OSError:  # it has ended
            continue
    return found


def test_a_killed_trainer_leaves_no_engine_and_engines_are_not_heard() -> None:
    mark = f"mark_{os.getpid()}_{time.time_ns()}"
    environment = with_root({**os.environ, "RAY_raylet_start_wait_time_s": "200", "TRAINER_MARK": mark})
    command = [sys.executable, "-m", "tests.support.ray.killed_trainer"]
    with subprocess.Popen(command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        said = []
        while "writes\n" not in said:
            said.append(trainer.stdout.readline())
            assert said[-1]
        assert len([line for line in processes_with(mark) if "EngineHost" in line]) == 2
        trainer.kill()
        assert "an engine talks" not in "".join([*said, trainer.stdout.read()])  # that is for the logs of Ray's session
    deadline = time.monotonic() + 60  # seconds on a machine that is free
    while (left := [line for line in processes_with(mark) if "EngineHost" in line]) and time.monotonic() < deadline:
        time.sleep(0.25)
    assert left == []


def test_ranks_write_with_engines_of_their_own_and_rank_zero_ends_the_cluster_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("RAY_")]:
        monkeypatch.delenv(name)  # as a user has it: Ray then authenticates
    ended = run_ranks("tests.support.ray.two_ranks", tmp_path, str(tmp_path))
    assert ended.statuses == [0, 0], ended.stderr[-3000:]
    (first, _, first_end), (second, second_has_read, _) = (
        json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1)
    )
    assert (first, second) == ([8], [11, 12])  # the prompt, and the sum of the rank's weights
    assert first_end > second_has_read


def test_too_many_engines_are_refused_by_what_is_free(cluster: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clusters, "_ROOM_SECONDS", 1)
    engine = RayEngine(CheapEngine(), num_engines=64)
    with pytest.raises(RuntimeError, match=r"64 engines on this rank, each with 1 CPU of one .* \d of 4 CPU are free"):
        engine.setup("", max_model_len=32, seed=0)
    engine = RayEngine(CheapEngine(), num_engines=1, gpus_per_engine=2)
    with pytest.raises(RuntimeError, match=r"with 1 CPU and 2 GPU of one node, .* and 0 of 0 GPU are free"):
        engine.setup("", max_model_len=32, seed=0)


def test_other_packages_on_a_node_are_named(cluster: None, monkeypatch: pytest.MonkeyPatch) -> None:
    of_trainer = {**clusters.installed_versions(), "torch": "1.0"}
    monkeypatch.setattr(remote_host, "installed_versions", lambda: of_trainer)
    engine = RayEngine(CheapEngine())
    with pytest.raises(RuntimeError, match=r"Engine 0 on .* has torch 2\S+ instead of 1\.0"):
        engine.setup("", max_model_len=32, seed=0)


def test_an_address_where_nobody_listens_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clusters.ray, "is_initialized", lambda: False)
    with pytest.raises(RuntimeError, match=r"`address` is '127\.0\.0\.1:1', and nobody listens there"):
        RayEngine(CheapEngine(), address="127.0.0.1:1").setup("", max_model_len=32, seed=0)


def test_ranks_have_equally_many_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    engine = RayEngine(VLLMEngine(max_num_seqs=8), num_engines=6)
    assert (engine.num_hosts, engine.max_num_seqs) == (3, 24)
    with pytest.raises(ValueError, match="`num_engines` is 3, and must be a multiple of the 2 ranks"):
        RayEngine(CheapEngine(), num_engines=3).setup("", max_model_len=32, seed=0)


def test_an_engine_that_writes_with_the_trainers_policy_is_refused() -> None:
    with pytest.raises(ValueError, match="`engine` TransformersEngine writes with the trainer's own policy"):
        RayEngine(TransformersEngine())


def test_without_ray_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install tlt-lightning\[ray\]"):
        RayEngine(CheapEngine())
