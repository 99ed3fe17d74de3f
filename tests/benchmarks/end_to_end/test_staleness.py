"""Arms and tables of the benchmark of old text."""

from typing import Any

import pytest

from benchmarks.end_to_end.staleness import arms, at, late_mean, over_tokens, report


def make_run(arm: str, accuracies: list[float], tokens: float, **more: list[Any]) -> dict[str, Any]:
    curves = {"val/accuracy": [(5 * i, value) for i, value in enumerate(accuracies)]}
    curves["rollout/tokens"] = [(i + 1, tokens) for i in range(5 * (len(accuracies) - 1))]
    return {"arm": arm, "curves": {**curves, **more}}


def test_accuracy_is_compared_where_all_runs_have_come_and_averaged_over_seeds() -> None:
    plain = [make_run("plain", values, 1000.0) for values in ([0.25, 0.5, 0.75], [0.5, 0.5, 1.0])]
    old = make_run("old", [0.25, 0.75, 0.5], 500.0, **{"schedule/age": [(1, 0.0), (2, 1.0), (3, 2.0), (4, 3.0)]})
    text = "\n".join(report([*plain, old]))
    assert "| arm | 0 | 3 | 7 | 10 | the last, by seed |" in text
    assert "| plain | 0.375 | 0.450 | 0.650 | 0.875 | 0.750, 1.000 |" in text
    assert "| arm | 0 | 2 | 3 | 5 | the last, by seed |" in text  # in thousands of tokens, of 10 in all
    assert "| old | 0.250 | 0.583 | 0.667 | 0.500 | 0.500 |" in text
    assert "| old | 2.5 | - | - | - |" in text
    assert late_mean(plain, "schedule/age") is None


def test_tokens_are_those_of_all_iterations_before_a_validation() -> None:
    curve = over_tokens(make_run("plain", [0.0, 1.0], 7.0))
    assert curve == [(0.0, 0.0), (35.0, 1.0)]
    assert [at(curve, x) for x in (0.0, 17.5, 35.0)] == pytest.approx([0.0, 0.5, 1.0])


def test_every_bound_is_clipped_against_both_policies() -> None:
    assert [name for name in arms() if name.startswith("async 4")] == ["async 4, behaviour", "async 4, old"]
    assert "max_staleness=4" in arms()["async 4, old"]
    assert "OldPolicy" not in arms()["async 4, behaviour"]
