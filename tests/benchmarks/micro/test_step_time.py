"""The report of `micro/step_time.py` says what is assumed and what is missing."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from benchmarks.micro import step_time
from benchmarks.micro.step_time import TINY_SCALE, render, save_configs, step_table
from tlt_lightning.speculation.head_files import check_head, read_head


def test_the_head_that_is_measured_fits_its_policy(tmp_path: Path) -> None:
    policy, head = save_configs(TINY_SCALE.shape, tmp_path)
    check_head(read_head(head), policy)


def test_failed_parts_are_named_and_missing_cells_are_dashes() -> None:
    record = {"size": "tiny", "command": "c", "hardware": "h", "versions": {}, "seed": 0, "note": ""}
    cells = {"1,0": 2.0, "1,3": 4.0, "4,0": 3.0, "4,3": 5.0}
    found = {"start_seconds": 9.0, "step_ms": cells}
    results = {"about": record, "failed": {"plain": "out of luck"}, "bucketed": found, "full": found}
    report = "\n".join(render(results, TINY_SCALE))
    assert "Failed: plain, `out of luck`." in report
    assert step_table(results, "bucketed", TINY_SCALE)[2] == "| 1 | - | 2 | - | - | 4 | - | - |"


def test_8_bit_stands_beside_16_bit_of_the_same_part() -> None:
    record = {"size": "tiny", "command": "c", "hardware": "h", "versions": {}, "seed": 0, "note": ""}
    wide = {"start_seconds": 9.0, "step_ms": {"1,0": 4.0, "4,0": 5.0}, "sync_seconds": 0.25, "weights_gib": 15.0}
    narrow = {"start_seconds": 9.0, "step_ms": {"1,0": 3.0}, "sync_seconds": 0.5, "weights_gib": 8.5}
    results = {"about": record, "failed": {}, "plain": wide, "plain fp8": narrow}
    report = "\n".join(render(results, TINY_SCALE))
    assert "| plain fp8 | 8.5 | 0.5 | - | - | - |" in report
    assert "| plain fp8 | 1 | 0 | 4 | 3 | 1.333 |" in report


def test_parts_of_an_earlier_command_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[str] = []

    def measure(function: Any, part: str, *scale: Any, num_ranks: int) -> dict[str, Any]:
        measured.append(part)
        return {"start_seconds": 9.0, "step_ms": {"1,0": 2.0, "4,0": 3.0}}

    monkeypatch.setattr(step_time, "run_apart", measure)
    arguments = ["--tiny", "--parts", "plain", "bucketed", "--out", str(tmp_path)]
    step_time.main([*arguments[:3], *arguments[4:]])
    step_time.main([*arguments, "--previous", str(tmp_path / "step_time.json")])
    assert measured == ["plain", "bucketed"]
    assert {"plain", "bucketed"} < set(json.loads((tmp_path / "step_time.json").read_text()))
    assert "\nGoes on from `" in (tmp_path / "step_time.md").read_text()


def test_an_engine_says_that_it_is_ready_and_waits_for_its_turn(tmp_path: Path) -> None:
    gate = str(tmp_path / "gate")
    waiting = threading.Thread(target=step_time.pass_gate, args=(gate,))
    waiting.start()
    while not Path(f"{gate}.ready").exists():
        waiting.join(0.01)
    waiting.join(0.3)
    assert waiting.is_alive()
    Path(f"{gate}.go").touch()
    waiting.join(100)
    assert not waiting.is_alive()


def test_cycles_of_sleep_are_told_by_the_first_ones_and_the_last() -> None:
    cycles = [[10.0 + number, 60.0, 0.05, 0.15, 0.1] for number in range(1, 51)]
    rows = step_time.sleep_table({"failed": {}, "bucketed": {"sleep_cycles": cycles}, "full": {}})
    assert [row.split(" | ")[1:3] for row in rows[5:-1]] == [
        ["1", "11"], ["2", "12"], ["3", "13"], ["25", "35"], ["50", "60"]
    ]  # fmt: skip
    assert step_time.sleep_table({"plain": {}}) == []
