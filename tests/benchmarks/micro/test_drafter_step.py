import json
from pathlib import Path

import pytest

from benchmarks.micro import drafter_step


@pytest.mark.slow
def test_each_vocabulary_and_stage_is_timed_and_its_kernels_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drafter_step, "STEPS", {"young": 1, "optimizer": 1, "whole": 1})  # profiling takes seconds
    monkeypatch.setattr(drafter_step, "NUM_PROMPTS", 1)
    drafter_step.main(["--tiny", "--out", str(tmp_path)])
    rows = json.loads((tmp_path / "drafter_step.json").read_text())["rows"]
    stages = ("young", "optimizer", "decision", "whole")
    assert [(row["vocabulary"], row["stage"]) for row in rows] == [(v, stage) for v in (128, 512) for stage in stages]
    # Weights of `fc`, of the layer and of the output head, at 3 drafts; steps of 128 tokens.
    young, optimizer = (row["tflops"] * 1e12 * row["seconds"] / row["tokens"] for row in rows[:2])
    matrices = [(64, 192), (64, 128), (32, 128), (32, 128), (64, 64), *[(64, 128)] * 3]
    assert optimizer == pytest.approx(sum(5 * (4 * m * n + 2 * m * m) * m for m, n in matrices) / 128)
    assert young - optimizer == pytest.approx(4 * 12288 + 3 * (6 * 45056 + 4 * 8192) + 2 * 8192)
    assert all(row["groups"]["matrix products"] > 0 and row["seconds"] > 0 for row in rows)
    assert "| matrix products |" in (tmp_path / "drafter_step.md").read_text()


def test_a_kernel_belongs_to_the_first_group_that_names_it() -> None:
    names = (
        "void flash_fwd_kernel<cutlass>",
        "nvjet_tst_128x256",
        "Memcpy HtoD (Pageable -> Device)",
        "loss_forward_kernel",
    )
    found = drafter_step.by_group([(name, 1, number) for number, name in enumerate(names, start=1)])
    assert {group: spent for group, spent in found.items() if spent} == {
        "attention": 1,
        "matrix products": 2,
        "copies from and to the host": 3,
        "losses over the vocabulary": 4,
    }
