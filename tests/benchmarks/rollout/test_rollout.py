"""`python -m benchmarks rollout`: what it measures in which order, what it makes of failures, what it writes."""

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest

from benchmarks.rollout import run as rollout
from benchmarks.rollout.arms import WarmUpSelector, arms_of
from benchmarks.rollout.process import EngineError
from benchmarks.rollout.report import arms_table
from benchmarks.rollout.steps import Row, by_batch, summarize
from tlt_lightning.speculation import CostModelSelector, FixedSelector, SelectorState, Strategy, ThresholdSelector
from tlt_lightning.speculation.strategy import OFF, MeasuredStep

pytestmark = pytest.mark.slow

LENGTHS = [40 + 9 * i for i in range(16)]
TAU = {"plain": 1.0, "K=1": 1.6, "K=3": 2.2, "K=5": 2.4, "K=7": 2.5}


class FakeEngines:
    """Engines whose rollouts take the time that their arm's name says."""

    broken = ""
    made: ClassVar[list["FakeEngines"]] = []

    def __init__(self, setup: Any) -> None:
        self.table: list[list[int]] = []
        self.descriptions: dict[str, Any] = {}
        self.calls: list[tuple[str, str]] = []
        self.needed: list[list[str]] = []
        self.made.append(self)

    def need(self, kinds: Any) -> None:
        self.needed.append(list(kinds))
        self.descriptions |= {kind: {"start s": 9.0, "graphs": "| graphs |"} for kind in self.needed[-1]}

    def get(self, kind: str) -> "FakeEngines":
        return self

    def call(self, name: str, arm: str, lengths: list[int] | None, seed: int) -> dict[str, Any]:
        self.calls.append((arm, name))
        if arm == self.broken:
            raise EngineError("Traceback\nRuntimeError: out of luck")
        lengths = lengths or LENGTHS
        tau, written, rows = TAU.get(arm, 2.3), 0.0, [Row(0.1, 16, 0, 16)]
        while rows[-1].running:
            written += tau
            running = sum(length > written for length in lengths)
            tokens = sum(min(length, int(written)) for length in lengths)
            rows.append(Row(rows[-1].elapsed + 0.004 + 0.001 * tau, running, 0, tokens, "learned_3"))
        result = summarize(rows, 16, rows[-1].elapsed, sum(lengths)) | {"lengths": list(lengths)}
        if arm != "plain":
            result |= {f"acceptance_rate_pos_{k}": 0.7**k for k in range(1, 8)}
            result |= {"acceptance_length": tau, "k_mean": 3.0, "off_share": 0.1}
        return result

    def close(self) -> None:
        self.needed.append([])


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.setattr(rollout, "Engines", FakeEngines)
    monkeypatch.setattr(FakeEngines, "broken", "")

    def run(*arguments: str) -> tuple[dict[str, Any], str, FakeEngines]:
        rollout.main(["--tiny", "--head", "best", "early", "--out", str(tmp_path), *arguments])
        results = json.loads((tmp_path / "rollout_tiny.json").read_text())
        return results, (tmp_path / "rollout_tiny.md").read_text(), FakeEngines.made[-1]

    return run


def test_everything_is_measured_compared_and_written(run: Any, tmp_path: Path) -> None:
    results, report, engines = run("--note", "Beside others.")
    measured = [(job["arm"], job["turn"]) for job in results["runs"] if job["part"] == "core"]
    arms = ["plain", "adaptive", "K=3", "K=5", "K=1", "K=7", "TLT rule", "BEG-MAB", "off"]
    assert measured == [("plain", 0), *((arm, turn) for turn in range(3) for arm in arms)]  # recorded, then in turns
    parts = [
        ["plain", "head"],
        ["table", "sampled"],
        ["vLLM K=3", "vLLM K=5"],
        ["head early", "sampled early"],
        ["mixed", "siblings", "ngram"],
    ]
    assert engines.needed == [*parts, ["sampled early in fp8", "head in fp8", "sampled in fp8", "plain in fp8"], []]
    assert results["lengths"] == LENGTHS
    assert results["failures"] == results["left_out"] == []
    assert engines.table == results["limit"]["best_k"]
    modelled, seen = (results["limit"][f"{kind}_seconds"]["plain"] for kind in ("modelled", "measured"))
    assert modelled == pytest.approx(seen, rel=0.05)
    for text in ("**Beside others.**", "## Limit", "| graphs |", "vLLM table", "adaptive, early"):
        assert text in report
    rows = [line.strip("| ").split(" | ") for line in report.splitlines() if line.count(" | ") > 12]
    of_the_limit = {row[0]: row[rows[0].index("of the limit")] for row in rows}
    assert of_the_limit["K=3"].endswith("%")
    assert of_the_limit["K=3, sampled drafts"] == of_the_limit["siblings"] == of_the_limit["K=3, early"] == "-"
    assert (tmp_path / "rollout_tiny.png").stat().st_size > 10_000


def test_named_arms_of_several_parts_take_turns(run: Any) -> None:
    results, _, engines = run("--arms", "plain", "plain, fp8", "--repeats", "2")
    order = [("plain", 0), ("plain", 0), ("plain, fp8", 0), ("plain", 1), ("plain, fp8", 1)]  # recorded first
    assert [(job["arm"], job["turn"]) for job in results["runs"]] == order
    assert engines.needed == [["plain", "plain in fp8"], []]


def test_an_arm_that_fails_takes_no_other_with_it(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeEngines, "broken", "K=5")
    results, report, engines = run("--parts", "core")
    assert [failure["job"] for failure in results["failures"]] == ["core: K=5, replayed #0"]
    assert results["left_out"] == [f"core: K=5, replayed #{turn}" for turn in (1, 2)]
    assert engines.calls.count(("K=7", "rollout")) == 3
    assert "out of luck" in report
    assert "## Limit" not in report  # it needs every fixed arm


def test_nothing_is_begun_beyond_the_budget(run: Any) -> None:
    with pytest.raises(SystemExit, match="plain engine was not measured"):
        run("--seconds", "0")
    assert FakeEngines.made[-1].calls == []
    assert FakeEngines.made[-1].needed == [[]]  # no engine is started either


def test_a_turn_that_stalled_is_told_and_does_not_move_the_median(run: Any) -> None:
    results, report, _ = run("--parts", "core")
    assert "stood still" not in report
    first = next(found for found in results["runs"] if found["arm"] == "K=3")
    first["seconds"] += 30.0
    first["stall_seconds"] = 30.0
    lines = arms_table(results)
    (row,) = [line for line in lines if line.startswith("| K=3 |")]
    assert row.startswith("| K=3 | 3 | 0.60 | 0.60 to 30.60 | 30.00 |")
    assert "**K=3 #0 stood still for 30.0 of its 30.6 s.**" in lines


def test_a_run_is_gone_on_with_unless_it_was_other_work(run: Any, tmp_path: Path) -> None:
    first, _, _ = run("--parts", "core", "--repeats", "1")
    earlier = tmp_path / "earlier.json"
    earlier.write_text(json.dumps(first))
    results, report, engines = run("--parts", "others", "--repeats", "1", "--resume", str(earlier))
    assert results["runs"][: len(first["runs"])] == first["runs"]
    assert engines.table == first["limit"]["best_k"]
    assert {arm for arm, _ in engines.calls} == {"vLLM table", "adaptive, sampled drafts", "K=3, sampled drafts"}
    assert "Gone on with" in report
    earlier.write_text(json.dumps(first | {"setup": first["setup"] | {"group_size": 8}}))
    with pytest.raises(SystemExit, match="measured with `group_size` 8, this run has 4"):
        run("--resume", str(earlier))


def test_without_a_head_only_look_ups_are_compared() -> None:
    assert list(arms_of(())) == ["plain", "plain, fp8", "siblings", "n-gram"]


def test_warming_up_covers_what_any_arm_reaches_and_then_one_is_in_force() -> None:
    warm_up = WarmUpSelector({"a": FixedSelector(3), "b": ThresholdSelector(7, max_running=4, band=0)})
    assert [arm.num_draft_tokens for arm in warm_up.arms(4)] == [0, 3, 7]
    assert [arm.num_draft_tokens for arm in warm_up.arms(5)] == [0, 3]
    assert {warm_up.select(SelectorState(4)).num_draft_tokens for _ in range(3)} == {0, 3, 7}
    warm_up.in_force = warm_up.selectors["a"]
    assert {warm_up.select(SelectorState(4)).num_draft_tokens for _ in range(3)} == {3}


def test_each_selector_is_calibrated_with_its_own_arms() -> None:
    adaptive = CostModelSelector()
    warm_up = WarmUpSelector({"fixed": FixedSelector(3), "adaptive": adaptive})
    assert warm_up.wants_calibration
    arms = (OFF, Strategy(3), Strategy(3, "sibling"))
    warm_up.calibrate([MeasuredStep(size, arm, 300.0, 0.005) for size in (1, 4, 16) for arm in arms])
    assert not adaptive.wants_calibration


def test_step_times_are_medians_of_each_batch_size_and_do_not_see_pauses() -> None:
    rows = [Row(0.010 * i, 5, 0, 10 * i) for i in range(9)]
    rows += [Row(1.0, 1, 0, 90), *(Row(1.0 + 0.004 * i, 1, 0, 90 + 2 * i) for i in range(1, 6))]
    assert by_batch(rows) == [[1.0, 5, 4.0, 2.0], [5.0, 9, 10.0, 2.0]]


def test_a_stall_is_what_medians_do_not_explain() -> None:
    times = [0.5 + 0.01 * i + (7.0 if i > 6 else 0.0) for i in range(20)]
    rows = [Row(seconds, 4, 0, 4 + 4 * i) for i, seconds in enumerate(times)]
    found = summarize([*rows, Row(times[-1] + 0.01, 0, 0, 90)], 4, times[-1] + 0.01, 90)
    assert found["stall_seconds"] == pytest.approx(7.0)


def test_a_rollout_is_summarized() -> None:
    prompts = [Row(0.5, 2, 2, 1), Row(1.0, 4, 0, 3)]  # the fourth request has written nothing yet
    rows = [*prompts, Row(2.0, 4, 0, 4), Row(3.0, 3, 1, 10), Row(10.0, 0, 0, 100)]
    found = summarize(rows, num_requests=4, seconds=10.0, tokens=100)
    assert (found["prefill_seconds"], found["tokens_per_s"]) == (2.0, 10.0)
    assert (found["preempted"], found["steps"]) == (1, 5)
