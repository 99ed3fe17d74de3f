"""`python -m benchmarks foretold`: decisions of several runs against what the engine found."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.end_to_end.foretold import decisions_of, main


def row(iteration: int, *rates: float, gain: float | None = None, length: float = 0.0, published: bool = True) -> Any:
    metrics = {f"speculation/acceptance_rate_pos_{k}": rate for k, rate in enumerate(rates, start=1)}
    if gain is not None:
        metrics |= {"drafter/acceptance_gain": gain, "drafter/acceptance_length": length}
        metrics["drafter/published"] = float(published)
    return {"iteration": iteration, "metrics": metrics}


ROWS = [row(1), row(2, 0.5, gain=0.4, length=1.4), row(3, 0.5, 0.2), row(4, 0.6, gain=0.1, length=1.8, published=False)]


def test_a_decision_is_compared_with_the_rollout_that_follows_it() -> None:
    published, refused = decisions_of(ROWS, "x")
    assert (published.iteration, published.published, published.length, published.found) == (2, True, 1.4, 1.5)
    assert (published.gain, published.found_gain) == (0.4, 0.5)
    assert not refused.published
    assert refused.found_gain == pytest.approx(-0.1)


def test_all_results_are_pooled(tmp_path: Path) -> None:
    for name in ("a", "b"):
        runs = [{"arm": "plain", "iterations": [row(1), row(2)]}, {"arm": "random", "iterations": ROWS}]
        (tmp_path / f"end_to_end_{name}.json").write_text(json.dumps({"runs": runs}))
    main(["--results", str(tmp_path), "--out", str(tmp_path)])
    # errors of the length: +0.1 and -0.2
    each = "-0.05 | 0.16 | {0} | +0.40 -> +0.50 | {0} | {0} | +0.10 -> -0.10 | 0 |"
    for line in (f"| a, random | {each.format(1)}", f"| all | {each.format(2)}"):
        assert line in (tmp_path / "foretold.md").read_text()
    assert len(json.loads((tmp_path / "foretold.json").read_text())["decisions"]) == 4
    assert (tmp_path / "foretold.png").exists()


def test_results_without_decisions_are_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--results", str(tmp_path)])
    assert "hold no run whose decisions foretell a gain" in capsys.readouterr().err
