"""Hosts as one engine, with an engine that costs nothing: order, balance, weights, and what goes wrong."""

import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import ray
import torch

from tests.support.ray.faulty_engine import DEADLY, FAULTY, LENGTHY, STUNNING, FaultyEngine, SlowToLoad
from tlt_lightning import RayEngine, Request, Response, RolloutProgress, Sampling
from tlt_lightning.engine.ray import cluster as clusters
from tlt_lightning.engine.ray import fleet, remote_host, snapshot
from tlt_lightning.engine.ray.host import EngineHost
from tlt_lightning.engine.usual import usual_engine

pytestmark = pytest.mark.ray

SAMPLING = Sampling(max_tokens=6)


def weights(value: float) -> list[tuple[str, torch.Tensor]]:
    return [("a", torch.full((3, 2), value)), ("b", torch.full((5,), value, dtype=torch.bfloat16))]


def requests(number: int, per_group: int = 2, first: int = 0, **given: Any) -> list[Request]:
    return [Request(id=first + i, prompt_ids=[i // per_group], group=i // per_group, **given) for i in range(number)]


def expected(request: Request, value: int, length: int = 6) -> list[int]:
    """The tokens that `CheapEngine` writes with `weights(value)`, which are 11 numbers."""
    return [request.prompt_ids[0] + 11 * value + place for place in range(length)]


def make(num_engines: int = 1, **given: Any) -> RayEngine:
    engine = RayEngine(FaultyEngine(**given), num_engines)
    engine.setup("", max_model_len=32, seed=0)
    engine.update_weights(weights(1), 0)
    return engine


@pytest.fixture(scope="module")
def engine(cluster: None) -> Iterator[RayEngine]:
    engine = make(2, step_seconds=0.02)
    yield engine
    for _ in range(2):
        engine.close()


@pytest.fixture
def failing(cluster: None) -> Iterator[RayEngine]:
    engine = make()
    yield engine
    engine.close()


def test_loading_is_in_no_stage(cluster: None) -> None:
    engine = RayEngine(SlowToLoad())
    engine.setup("", max_model_len=32, seed=0)
    ready = time.perf_counter()
    waited = sum(seconds for stages in engine.take_laps().values() for _, seconds in stages)
    assert waited < time.perf_counter() - ready + 1
    engine.close()


class Reader(FaultyEngine):
    """Reads the policy."""

    def setup(self, policy: str, *, max_model_len: int, seed: int) -> None:
        self.versions = [int(Path(policy).read_text())]


def test_an_engine_finds_what_the_trainer_finds_by_a_relative_path(
    cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "policy").write_text("7")
    monkeypatch.chdir(tmp_path)  # which the cluster was not started in
    engine = RayEngine(Reader())
    engine.setup("policy", max_model_len=32, seed=0)
    engine.update_weights(weights(1), 8)
    list(engine.generate(requests(1), SAMPLING, seed=0))
    assert engine.state_dict()["versions"] == [7, 8]
    engine.close()


def test_groups_stay_together_and_load_is_even(engine: RayEngine) -> None:
    asked = requests(12, per_group=3)
    answers = [(each.request_id, list(each.token_ids)) for each in engine.generate(asked, SAMPLING, seed=0)]
    assert sorted(answers) == [(request.id, expected(request, 1)) for request in asked]
    assert sorted(host.index for host in engine._live._host_of.values()) == [0, 0, 1, 1]  # by group


def test_progress_sums_the_engines(engine: RayEngine) -> None:
    seen: list[RolloutProgress] = []
    list(engine.generate(requests(10), SAMPLING, seed=0, on_progress=seen.append))
    assert all(each.total == 10 for each in seen)
    assert (seen[-1].finished, seen[-1].tokens, seen[-1].longest) == (10, 60, 6)
    assert engine.stats() == {"speculation/acceptance_length": 1.0}


def test_each_engine_tells_when_it_wrote_took_weights_and_waited(engine: RayEngine) -> None:
    engine.take_laps()
    started = time.perf_counter()
    list(engine.generate(requests(4), SAMPLING, seed=0))
    engine.update_weights(weights(1), 0)
    list(engine.generate(requests(4), SAMPLING, seed=0))
    laps = engine.take_laps()
    seconds = time.perf_counter() - started
    assert list(laps) == ["engine 0", "engine 1"]
    for stages in laps.values():
        assert {"writing", "weights", "waiting"} == {stage for stage, _ in stages}
        assert sum(value for _, value in stages) == pytest.approx(seconds, abs=0.3)
        assert sum(value for stage, value in stages if stage == "writing") > 6 * 0.02  # two rollouts
    again = sum(value for stages in engine.take_laps().values() for _, value in stages) / 2
    assert again < time.perf_counter() - started - seconds + 0.3


def test_weights_come_while_requests_run_and_what_is_added_begins_with_them(engine: RayEngine) -> None:
    long, added = requests(4, max_tokens=100), requests(4, first=10)
    found: dict[int, Response] = {}
    for response in engine.generate([*requests(1, first=50), *long], SAMPLING, seed=0):
        if not found:
            engine.update_weights(weights(2), 1)
            engine.add(added)
        found[response.request_id] = response
    engine.update_weights(weights(1), 2)
    assert len(found) == 9
    for request in added:
        assert (found[request.id].policy_versions, [*found[request.id].token_ids]) == ((1,), expected(request, 2))
    for request in long:
        response = found[request.id]
        (_, start), (_, rest) = response.segments
        assert (response.policy_versions, start + rest) == ((0, 1), 100)
        assert [*response.token_ids] == expected(request, 1, 100)[:start] + expected(request, 2, 100)[start:]


class Halting(FaultyEngine):
    """Ends no step after its first before there is a file."""

    def __init__(self, go_on: Path) -> None:
        super().__init__()
        self.go_on = go_on

    def _step(self, number: int, sampling: Sampling) -> Response | None:
        while self._running[number][1] and not self.go_on.exists():
            time.sleep(0.01)
        return super()._step(number, sampling)


def test_a_slow_engine_holds_up_no_update_and_loads_the_newest_alone(cluster: None, tmp_path: Path) -> None:
    engine = RayEngine(Halting(tmp_path / "go"))
    engine.setup("", max_model_len=32, seed=0)
    engine.update_weights(weights(1), 0)
    stream = engine.generate([Request(0, [1], max_tokens=1), Request(1, [1], max_tokens=2)], SAMPLING, seed=0)
    next(stream)  # and the second step begins
    for version in range(1, 5):
        engine.update_weights(weights(version), version)  # were one to wait for the step, it would never end
    (host,) = engine._live.hosts
    while ray.get(host._actor.__ray_call__.remote(lambda host: host._newest["weights"][1].version)) < 4:
        time.sleep(0.01)
    (tmp_path / "go").touch()
    list(stream)
    assert engine.state_dict() == {"versions": [0, 4], "hosts": [{"versions": [0, 4]}]}
    engine.close()


def test_what_was_given_up_is_answered_to_nobody(engine: RayEngine) -> None:
    stream = engine.generate([Request(0, [0], max_tokens=1), *requests(4, first=1, max_tokens=9999)], SAMPLING, seed=0)
    next(stream)
    stream.close()
    answers = [(each.request_id, len(each.token_ids)) for each in engine.generate(requests(4), SAMPLING, seed=0)]
    assert sorted(answers) == [(number, 6) for number in range(4)]


def test_stopped_requests_end_unfinished(engine: RayEngine) -> None:
    found = {}
    for response in engine.generate([*requests(4, max_tokens=9999), Request(9, [0])], SAMPLING, seed=0):
        engine.stop(range(4))
        found[response.request_id] = response.finish_reason
    assert found == {9: "length", **dict.fromkeys(range(4), "unfinished")}


def test_a_host_that_dies_is_replaced_and_every_request_is_answered_once(
    engine: RayEngine, caplog: pytest.LogCaptureFixture
) -> None:
    asked = [*requests(6, max_tokens=60), Request(9, [0], group=9)]
    engine.update_weights(weights(3), 3)
    answers = []
    for response in engine.generate(asked, SAMPLING, seed=0):
        if not answers:
            ray.kill(engine._live.hosts[0]._actor)
        answers.append((response.request_id, [*response.token_ids], response.policy_versions))
    assert sorted(answers) == [(each.id, expected(each, 3, each.max_tokens or 6), (3,)) for each in asked]
    assert "Engine 0 died, and a new one takes its place" in caplog.text
    first, second = (state["versions"] for state in engine.state_dict()["hosts"])
    assert first == [*second, 3]  # it knew what the dead one had learned, and loaded the newest weights
    engine.update_weights(weights(1), 4)


def test_a_host_that_dies_again_and_again_ends_the_run(failing: RayEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "MAX_DEATHS", 1)
    with pytest.raises(RuntimeError, match="Engine 0 has died 2 times without answering a request"):
        list(failing.generate([Request(0, [DEADLY])], SAMPLING, seed=0))


def test_a_host_that_gives_no_sign_of_life_is_dead(
    failing: RayEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(remote_host, "MUTE_SECONDS", 2)
    monkeypatch.setattr(fleet, "MAX_DEATHS", 1)
    with pytest.raises(RuntimeError, match=r"Engine 0 has died 2 times .* no sign of life for 2 seconds"):
        list(failing.generate([Request(0, [STUNNING])], SAMPLING, seed=0))
    assert "Engine 0 died, and a new one takes its place" in caplog.text


def test_a_host_that_gets_nowhere_is_named_once(
    failing: RayEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(remote_host, "STUCK_SECONDS", 2)
    monkeypatch.setattr(remote_host, "_AWAY_SECONDS", 1.5)
    assert len(list(failing.generate([Request(0, [0]), Request(1, [LENGTHY])], SAMPLING, seed=0))) == 2
    assert caplog.text.count("Engine 0 has ended neither an engine step nor a command for 2 s") == 1
    time.sleep(3)  # it waits for requests
    assert len(list(failing.generate([Request(2, [0])], SAMPLING, seed=0))) == 1
    assert caplog.text.count("neither an engine step") == 1


def test_a_new_process_that_is_lost_before_it_starts_is_of_the_same_death(
    failing: RayEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a node that goes down: its processes first, and then itself."""
    monkeypatch.setattr(fleet, "MAX_DEATHS", 1)
    (host,), lost = failing._live.hosts, []

    def start(start: Any = host.start) -> None:
        start()
        lost.append(host._actor)
        if len(lost) == 1:
            ray.kill(host._actor)

    monkeypatch.setattr(host, "start", start)
    list(failing.generate([Request(0, [0])], SAMPLING, seed=0))
    ray.kill(host._actor)
    asked = Request(1, [0])
    (response,) = failing.generate([asked], SAMPLING, seed=0)
    assert [*response.token_ids] == expected(asked, 1)
    assert len(lost) == 2


def test_what_is_restored_is_saved_before_the_engines_have_told(engine: RayEngine) -> None:
    engine.load_state_dict({"hosts": [{"versions": [7]}]})  # of a run with one
    assert engine.state_dict() == {"versions": [7], "hosts": [{"versions": [7]}] * 2}
    list(engine.generate(requests(4), SAMPLING, seed=0))
    assert engine.state_dict() == {"versions": [7], "hosts": [{"versions": [7]}] * 2}


def test_a_response_that_ends_while_a_report_is_made_is_in_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    host, begins, may_end = EngineHost("Engine 0"), threading.Event(), threading.Event()
    host._engine = engine = FaultyEngine()
    step = engine._step
    monkeypatch.setattr(engine, "_step", lambda *given: (begins.set(), may_end.wait(100)) and step(*given))
    host.write(1, requests(1, max_tokens=1), SAMPLING, 0)
    writer = threading.Thread(target=host._write)
    writer.start()
    assert begins.wait(100)
    with host._changed:  # as `take` holds it from its copy of what has ended until it forgets that
        may_end.set()
        time.sleep(0.5)
        assert host._ended == []
    writer.join()
    assert [response.request_id for response in host.take(0).responses] == [0]


def test_engines_suit_the_machine_unless_they_are_named() -> None:
    engine, usual = RayEngine().engine, usual_engine()
    assert type(engine) is type(usual)
    assert (engine.dtype, engine.enforce_eager) == (usual.dtype, usual.enforce_eager)  # type: ignore[attr-defined]


def test_an_engine_tells_what_it_had_drafted_when_new_weights_came(monkeypatch: pytest.MonkeyPatch) -> None:
    host, counts = EngineHost("Engine 0"), {"drafts": 3.0}
    host._engine = FaultyEngine()
    monkeypatch.setattr(host._engine, "stats", lambda: {**counts})
    monkeypatch.setattr(host._engine, "update_weights", lambda *_: counts.update(drafts=0.0))
    host.tell(1, partial(EngineHost.update, kind="weights"), ("weights", cast("Any", SimpleNamespace(version=1))))
    host._carry_out()
    assert host.take(0).stats == {"drafts": 3.0}


def test_what_was_being_written_ends_with_close(failing: RayEngine) -> None:
    stream = failing.generate([Request(0, [0], max_tokens=1), Request(1, [0], max_tokens=9999)], SAMPLING, seed=0)
    next(stream)
    failing.close()
    assert list(stream) == []


def test_a_host_that_finds_no_place_ends_the_run(cluster: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clusters, "check_room", lambda *_: None)  # another run took it since then
    monkeypatch.setattr(remote_host, "START_SECONDS", 1)
    engine = RayEngine(FaultyEngine(), gpus_per_engine=1)
    with pytest.raises(RuntimeError, match=r"Engine 0 has not started in 1 seconds: .* 'num_gpus': 1"):
        engine.setup("", max_model_len=32, seed=0)


def test_an_error_in_a_host_comes_with_its_name_and_reason(failing: RayEngine) -> None:
    with pytest.raises(RuntimeError, match=rf"Engine 0 on .* \(process \d+\) failed: token {FAULTY} is beyond me"):
        list(failing.generate([Request(0, [FAULTY])], SAMPLING, seed=0))


def test_a_corrupted_tensor_ends_the_run_by_host_and_version(
    failing: RayEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def corrupted(arrays: list[Any]) -> Any:
        arrays[1].view("uint8")[3] ^= 4
        return put(arrays)

    put = ray.put
    list(failing.generate(requests(2), SAMPLING, seed=0))  # its first weights are on their way no more
    monkeypatch.setattr(snapshot.ray, "put", corrupted)
    failing.update_weights(weights(1), 7)
    with pytest.raises(RuntimeError, match=r"Engine 0 on .* failed: b of version 7 arrived with other bits"):
        list(failing.generate(requests(2), SAMPLING, seed=0))
