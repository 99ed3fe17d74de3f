"""The report of `micro/step_time.py` says what is assumed and what is missing."""

from benchmarks.micro.step_time import render, step_table
from benchmarks.micro.step_time_scales import TINY


def test_rates_are_called_bounds_and_failed_parts_are_named() -> None:
    record = {"rung": "tiny", "command": "c", "hardware": "h", "versions": {}, "seed": 0, "note": ""}
    cells = {"1,0": 2.0, "1,3": 4.0, "4,0": 3.0, "4,3": 5.0}
    bucketed = {"start_seconds": 9.0, "step_ms": cells, "every_step_ms": {"1,0": 2.5, "4,0": 3.5}}
    full = {"start_seconds": 9.0, "step_ms": cells}
    results = {"about": record, "failed": ["plain"], "bucketed": bucketed, "full": full}
    report = render(results, TINY)
    assert "Failed: plain." in report
    assert "Rates are bounds, not measured" in report
    rows = {part: step_table(results, part, TINY)[2] for part in ("bucketed", "full")}
    assert rows["bucketed"] == "| 1 | - | 2 | - | 2.5 | - | 4 | - | - | 1,000 (K=3) | - |"
    assert rows["full"] == "| 1 | - | 2 | - | - | - | 4 | - | - | 1,000 (K=3) | - |"  # nothing from another process
