"""The picture of a rollout."""

import json
from pathlib import Path

import pytest

from benchmarks.rollout.step_picture import draw_rollout


def save_trace(path: Path) -> Path:
    rows = []
    for step in range(300):
        running = max(1, 64 - step // 4)
        k, name = (0, "off") if running > 32 else (5, "learned_5") if step % 2 else (7, "sibling_7")
        row = {
            "rollout": 0,
            "step": step,
            "time": 0.01 * step,
            "running": running,
            "waiting": max(0, 20 - step),
            "k": k,
        }
        row |= {"verifies": name, "verifications": running if k else 0, "accepted": 2 * running if k else 0}
        rows.append(json.dumps(row))
    path.write_text("\n".join(rows) + "\n")
    return path


def test_a_rollout_is_drawn(tmp_path: Path) -> None:
    trace = save_trace(tmp_path / "trace.jsonl")
    draw_rollout(trace, tmp_path / "pictures" / "rollout.png")
    draw_rollout(trace, tmp_path / "rollout.svg", rollout=0)
    assert (tmp_path / "pictures" / "rollout.png").stat().st_size > 10_000
    text = (tmp_path / "rollout.svg").read_text()
    assert text.count("<!-- ") > 20  # its labels
    for label in ("running requests", "waiting", "drafts per request", "learned", "sibling", "off"):
        assert label in text


def test_a_rollout_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no step of rollout 3"):
        draw_rollout(save_trace(tmp_path / "trace.jsonl"), tmp_path / "x.png", rollout=3)
