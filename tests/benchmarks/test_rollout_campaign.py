"""`rollout/run.py`: what it measures in which order, what it makes of failures, and what it writes."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.rollout import process as rollout_process
from benchmarks.rollout import run as rollout
from benchmarks.rollout.arms import KS, Tour, arms_of, is_modelled
from benchmarks.rollout.process import EngineError
from benchmarks.rollout.report import arms_table
from benchmarks.rollout.steps import Row, summarize
from tlt_lightning.speculation import FixedSelector, ThresholdSelector

LENGTHS = [40 + 9 * i for i in range(16)]
TAU = {"plain": 1.0, "K=1": 1.6, "K=3": 2.2, "K=5": 2.4, "K=7": 2.5}


class FakeProcess:
    """An engine whose rollouts take the time that their arm's name says."""

    def __init__(self, engines: "FakeEngines", kind: str) -> None:
        self.engines, self.kind = engines, kind

    def ready(self) -> dict[str, Any]:
        table = {"graph_table": "| graphs |", "graph_mib": {"target": 7.0}} if self.kind == "full_pool" else {}
        numbers = dict.fromkeys(("weights_gib", "kv_bytes_per_token", "peak_allocated_gib", "reserved_gib"), 1.0)
        return {
            "start_seconds": 9.0,
            "async_scheduling": True,
            "max_num_batched_tokens": 16384,
            "kv_tokens": 20000,
            "device_gib": 100.0,
            **numbers,
            **table,
        }

    def call(self, name: str, seconds: float, arm: str, **arguments: Any) -> dict[str, Any]:
        self.engines.calls.append((self.kind, name, arm))
        if arm == self.engines.broken:
            raise EngineError("Traceback\nRuntimeError: out of luck")
        if name == "cell":
            return {"tokens_per_s": 100.0 if arm == "plain" else 150.0, "step_ms": 1.0}
        lengths = arguments["lengths"] or LENGTHS
        tau, written, rows = TAU.get(arm, 2.3), 0.0, [Row(0.1, 16, 0, 16)]
        while rows[-1].running:
            written += tau
            running = sum(length > written for length in lengths)
            tokens = sum(min(length, int(written)) for length in lengths)
            rows.append(Row(rows[-1].elapsed + 0.004 + 0.001 * tau, running, 0, tokens))
        result = summarize(rows, 16, rows[-1].elapsed, sum(lengths)) | {"lengths": list(lengths)}
        result["acceptance_by_phase"] = [[0.7] * 7] * 8
        if arm != "plain":
            result |= {"acceptance_length": tau, "acceptance_rate_pos_1": 0.7, "k_mean": 3.0, "off_share": 0.1}
        if arm == "adaptive":
            keys = ("time", "running", "waiting", "k", "verifies", "verifications", "accepted")
            result["trace"] = [dict(zip(keys, (0.1 * i, 9, 0, 3, "learned_3", 9, 5), strict=True)) for i in range(9)]
        return result | ({"texts": [[1, 2]] * 16} if arguments.get("texts") else {})


class FakeEngines:
    broken = ""

    def __init__(self, setup: Any) -> None:
        self.table: list[list[int]] = []
        self.descriptions: dict[str, Any] = {}
        self.calls: list[tuple[str, str, str]] = []
        self.needed: list[list[str]] = []
        self.tables: list[list[list[int]]] = []
        self.kept: list[set[str]] = []
        made.append(self)

    def need(self, kinds: Any, later: Any = ()) -> None:
        self.kept.append(set(later))
        self.needed.append(list(kinds))
        self.tables.append(self.table)

    def get(self, kind: str) -> FakeProcess:
        process = FakeProcess(self, kind)
        self.descriptions[kind] = process.ready()
        return process

    def close(self) -> None:
        self.needed.append([])


made: list[FakeEngines] = []


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.setattr(rollout, "Engines", FakeEngines)
    monkeypatch.setattr(FakeEngines, "broken", "")

    def run(*arguments: str) -> tuple[dict[str, Any], str, FakeEngines]:
        rollout.main(["--tiny", "--head", "best", "early", "--out", str(tmp_path), *arguments])
        results = json.loads((tmp_path / "rollout_tiny.json").read_text())
        return results, (tmp_path / "rollout_tiny.md").read_text(), made[-1]

    return run


def test_everything_is_measured_compared_and_written(run: Any, tmp_path: Path) -> None:
    results, report, engines = run("--note", "Padded.")
    measured = [(job["arm"], job["turn"]) for job in results["runs"] if job["part"] == "core"]
    arms = ["plain", "adaptive", "K=3", "K=5", "K=1", "K=7", "TLT rule", "BEG-MAB"]
    assert measured == [("plain", 0), *((arm, turn) for turn in range(3) for arm in arms)]  # recorded, then in turns
    assert engines.needed == [
        *(["plain", "steered"],) * 3,
        ["steered"],
        ["table", "probabilistic", "plain"],
        ["defaults", "full_pool"],
        [],
    ]
    assert engines.kept[3] == {"table", "probabilistic", "plain", "defaults", "full_pool"}  # while `extra` runs
    assert results["lengths"] == LENGTHS
    assert results["failures"] == results["left_out"] == []
    assert engines.table == results["limit"]["best_k"]
    assert results["limit"]["modelled_seconds"]["plain"] == pytest.approx(
        results["limit"]["measured_seconds"]["plain"], rel=0.05
    )
    for text in (
        "**Padded.**",
        "## Limit",
        "1.50 (150)",
        "| graphs |",
        "vLLM table",
        "K=3, random head",
        "adaptive, early",
    ):
        assert text in report
    assert "Failed" not in report
    rows = [line.strip("| ").split(" | ") for line in report.splitlines() if line.count(" | ") > 12]
    of_the_limit = {row[0]: row[rows[0].index("of the limit")] for row in rows[: len(arms_of(("best", "early")))]}
    assert of_the_limit["K=3"].endswith("%")
    assert of_the_limit["K=3, sampled drafts"] == of_the_limit["siblings"] == "-"
    assert (tmp_path / "rollout_tiny.png").stat().st_size > 10_000


def test_an_arm_that_fails_takes_no_other_with_it(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeEngines, "broken", "K=5")
    results, report, engines = run("--parts", "core")
    assert [failure["job"] for failure in results["failures"]] == ["core: K=5, replayed #0"]
    assert results["left_out"] == [f"core: K=5, replayed #{turn}" for turn in (1, 2)]
    assert len([call for call in engines.calls if call[2] == "K=7"]) == 3
    assert "out of luck" in report
    assert "## Limit" not in report  # it needs every fixed arm


def test_nothing_is_begun_beyond_the_budget(run: Any) -> None:
    with pytest.raises(SystemExit, match="plain engine was not measured"):
        run("--seconds", "0")
    assert made[-1].calls == []
    assert made[-1].needed == [[]]  # no engine is started either


def test_a_turn_that_stalled_is_told_and_does_not_move_the_median(run: Any) -> None:
    results, report, _ = run("--parts", "core")
    assert "stood still" not in report
    first = next(found for found in results["runs"] if found["arm"] == "K=3")
    first["seconds"] += 30.0
    (row,) = [line for line in arms_table(results, "replayed", "", "") if line.startswith("| K=3 |")]
    assert row.startswith("| K=3 | 3 | 0.60 | 0.60 to 30.60 | 30.00 |")
    assert "**K=3 #0 stood still for 30.0 of its 30.6 s.**" in arms_table(results, "replayed", "", "")


def test_only_arms_that_draft_alike_are_held_to_the_limit() -> None:
    heads = ("best", "early")
    held = {name for name, arm in arms_of(heads).items() if is_modelled(arm, heads)}
    assert {"plain", "K=3", "adaptive", "TLT rule", "off", "vLLM table"} <= held
    assert held.isdisjoint({"siblings", "n-gram", "adaptive, siblings too", "K=3, early", "K=3, sampled drafts"})


def test_results_of_other_work_are_not_gone_on_from(run: Any, tmp_path: Path) -> None:
    first, _, _ = run("--parts", "core", "--repeats", "1")
    earlier = tmp_path / "earlier.json"
    earlier.write_text(json.dumps(first | {"setup": first["setup"] | {"group_size": 8}}))
    with pytest.raises(SystemExit, match="measured with `group_size` 8, this run has 4"):
        run("--resume", str(earlier))


def test_a_policy_that_is_not_there_is_an_early_error(run: Any) -> None:
    with pytest.raises(SystemExit, match="nowhere holds no policy"):
        run("--policy", "nowhere")


def test_a_run_is_gone_on_with(run: Any, tmp_path: Path) -> None:
    first, _, _ = run("--parts", "core", "--repeats", "1")
    earlier = tmp_path / "earlier.json"
    earlier.write_text(json.dumps(first | {"lengths": LENGTHS[::-1]}))
    results, report, engines = run("--parts", "others", "cells", "--repeats", "1", "--resume", str(earlier))
    assert results["runs"][: len(first["runs"])] == first["runs"]
    assert results["lengths"] == LENGTHS[::-1]  # though a rollout is recorded again, for the text of the cells
    assert engines.tables[0] == first["limit"]["best_k"]
    assert {call[2] for call in engines.calls if call[1] == "rollout"} == {
        "plain",
        "vLLM table",
        *(f"{arm}, sampled drafts" for arm in ("adaptive", "K=3", "K=5")),
    }
    assert "Gone on with" in report


def test_graphs_and_warm_up_cover_what_any_arm_reaches() -> None:
    tour = Tour([FixedSelector(3), ThresholdSelector(7, max_running=4, band=0)])
    assert [arm.num_draft_tokens for arm in tour.arms(4)] == [0, 3, 7]
    assert [arm.num_draft_tokens for arm in tour.arms(5)] == [0, 3]
    state = rollout_state(4)
    assert {tour.select(state).num_draft_tokens for _ in range(3)} == {0, 3, 7}


def rollout_state(batch: int) -> Any:
    from tlt_lightning.speculation import SelectorState

    return SelectorState(batch_size=batch)


def test_arms_without_a_head_need_none() -> None:
    assert all(arm.head is None for arm in arms_of(()).values())
    steered = [arm for arm in arms_of(("best",)).values() if arm.engine == "steered"]
    assert "K=3, random head" in arms_of(("best", "early"))
    assert "K=3, random head" not in arms_of(("best", "head-random"))  # which is there to be used instead
    longest = max(a.num_draft_tokens for arm in steered if arm.selector for a in arm.selector().arms(1))
    assert longest == max(KS)


def test_graphs_memory_is_told_only_of_engines_that_started_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Started:
        """A process whose engine counts, in what its graphs take, whatever the device got meanwhile."""

        def __init__(self, setup: Any, kind: str, table: list[list[int]]) -> None:
            self.started_alone, self.is_ready, self.is_alive = True, False, True

        def ready(self) -> dict[str, Any]:
            self.is_ready = True
            return {"graph_mib": {"target": 7.0}, "graph_table": "| graphs |", "kv_tokens": 5}

        def close(self) -> None:
            pass

    monkeypatch.setattr(rollout_process, "EngineProcess", Started)
    engines = rollout_process.Engines(setup=None)  # type: ignore[arg-type]
    engines.need(["plain", "steered"])
    engines.need(["full_pool"], later=["steered"])
    for kind in ("steered", "full_pool"):
        engines.get(kind)
    assert engines.descriptions["steered"] == {"kv_tokens": 5}
    assert engines.descriptions["full_pool"]["graph_mib"] == {"target": 7.0}
