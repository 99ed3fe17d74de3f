"""The benchmark of look-ups looks every request up, and finds what siblings wrote."""

import json
from pathlib import Path

import pytest

from benchmarks.micro import lookup_costs as lookup_costs


@pytest.mark.vllm
def test_every_running_request_is_looked_up_in_every_step(tmp_path: Path) -> None:
    lookup_costs.main(["--num-prompts", "2", "--group-size", "4", "--rounds", "1", "--out", str(tmp_path)])
    rows = json.loads((tmp_path / "lookup_costs.json").read_text())["by_batch"]
    assert [row["least"] for row in rows] == [1, 2, 4, 8]
    assert all(row["us_a_request"] > 0 for row in rows)
    assert max(int(row["found"].rstrip("%")) for row in rows) > 20
