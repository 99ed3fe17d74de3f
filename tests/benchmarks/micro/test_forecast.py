"""The memory that recipes are said to take is what is forecast."""

import json
import re
from pathlib import Path

import pytest

from benchmarks.common.arguments import RESULTS, ROOT
from benchmarks.micro.forecast import CASES, main


@pytest.mark.slow
def test_a_run_forecasts_what_the_results_say(tmp_path: Path) -> None:
    main(["--tiny", "--out", str(tmp_path)])
    kept, found = (json.loads((folder / "forecast.json").read_text())["runs"] for folder in (RESULTS, tmp_path))
    assert len(kept) == len(CASES)
    assert found[0]["parts"] == pytest.approx(kept[0]["parts"], rel=1e-3)
    for name in ("micro_batch_tokens", "update", "rollout"):
        assert found[0][name] == pytest.approx(kept[0][name], rel=1e-3)


def test_the_page_has_the_results() -> None:
    rows = json.loads((RESULTS / "forecast.json").read_text())["runs"]
    gpus = r"\| (\d+) x (\d+) GB \| ([\d,]+) \| ([\d.]+) \| ([\d.]+) \|"
    told = re.findall(gpus, (ROOT / "docs/many_gpus.md").read_text())
    names = ("num_gpus", "gpu_gb", "micro_batch_tokens")
    assert told == [
        (*(f"{row[name]:,}" for name in names), f"{row['update']:.1f}", f"{row['rollout']:.1f}") for row in rows
    ]
