"""What idle windows would hide of scoring."""

import json
from pathlib import Path

import pytest

from benchmarks.micro.stage_fusion import read_stages, rows_of, saved_in_windows
from tlt_lightning.callbacks.report_page import page


@pytest.mark.parametrize(
    ("ranks", "saved"),
    [
        ([{"logprobs": 2.0, "idle": 0.0}, {"logprobs": 2.0, "idle": 9.0}], 0.0),  # the last to write scores as long
        ([{"logprobs": 1.0}, {"logprobs": 3.0, "idle": 9.0}], 2.0),  # what is uneven is hidden
        ([{"logprobs": 1.0}, {"logprobs": 3.0, "idle": 0.5}], 0.5),
    ],
)
def test_the_last_to_write_has_no_window(ranks: list[dict[str, float]], saved: float) -> None:
    assert saved_in_windows(ranks) == saved


def test_stages_are_read_from_a_report(tmp_path: Path) -> None:
    ranks = [
        [("rollout", 6.0), ("logprobs", 1.0), ("rollout", 1.0)],
        [("rollout", 4.0), ("idle", 3.0), ("logprobs", 1)],
    ]
    data = {"details": {10: {"ranks": ranks}, 9: {"ranks": ranks[:1]}}}
    (tmp_path / "report.html").write_text(page(json.loads(json.dumps(data))))
    found = read_stages(tmp_path / "report.html")
    assert found == [[{"rollout": 7.0, "logprobs": 1.0}], [{"rollout": 7.0, "logprobs": 1.0}, dict(ranks[1])]]
    assert [row[1:] for row in rows_of(found[1:])[1]][-2:] == [["0.000", "0.0%"], ["1.000", "12.5%"]]
