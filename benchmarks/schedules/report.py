"""Write the report of `python -m benchmarks schedules`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from benchmarks.common.results import heading, table
from benchmarks.schedules.cases import EXTRAS
from benchmarks.schedules.check import report_check

RATIOS = (0.0, 1 / 4, 2 / 3, 1.0, 1.5, 3.0)
"""Edges of the share of steps saved over that of tokens thrown away."""

Rows = Sequence[Mapping[str, Any]]


def report(results: Mapping[str, Any]) -> list[str]:
    """Return the lines of the report."""
    lines = heading("Schedules, simulated", results["about"])
    lines += ["`python -m benchmarks schedules --help` says what is simplified.", ""]
    lines += report_check(results["check"])
    for part in (recorded, break_even, resampled):
        lines += part(results["rows"])
    return lines


def recorded(rows: Rows) -> list[str]:
    """Return what schedules do on recorded lengths."""
    names = list(rows[0]["relative"])
    lines = [
        "## Recorded lengths",
        "",
        "By policy, seconds of a rollout over the synchronous ones. Steps saved: were one token a step. Thrown away: "
        "of all tokens. Idle: 1 - mean running / most running, 7B, plain. Continued: responses; read again: their "
        "text, of the tokens learned from; age: of tokens, in iterations.",
        "",
    ]
    header = ["lengths", "workers", "schedule", *names, "steps saved", "thrown away", "idle", "continued"]
    header += ["read again", "age"]
    cells = []
    for row in [row for row in rows if row["is_recorded"]]:
        shares = [row["saved_steps"], row["thrown_away"], row["idle"]["7B, plain"], row["continued"], row["read"]]
        relative = [f"{row['relative'][name]:.2f}" for name in names]
        shown = [row["lengths"], row["workers"], row["schedule"], *relative]
        cells.append([*shown, *(f"{share:.0%}" for share in shares), f"{row['age']:.2f}"])
    return lines + table(header, cells)


def break_even(rows: Rows) -> list[str]:
    """Return what tail batching gains by steps saved over tokens thrown away."""
    names = list(rows[0]["relative"])
    lines = [
        "## When tail batching pays",
        "",
        "All its rows above and below, by the share of steps saved over that of tokens thrown away: least to most "
        "seconds over the synchronous ones.",
        "",
    ]
    batched = [row for row in rows if row["thrown_away"]]
    cells: list[list[Any]] = []
    for low, high in pairwise(RATIOS):
        inside = [row["relative"] for row in batched if low <= row["saved_steps"] / row["thrown_away"] < high]
        if inside:
            ends = [sorted(each[name] for each in inside) for name in names]
            cells.append([f"{low:.2f} to {high:.2f}", len(inside), *(f"{e[0]:.2f} to {e[-1]:.2f}" for e in ends)])
    return lines + table(["saved / thrown away", "rows", *names], cells)


def resampled(rows: Rows) -> list[str]:
    """Return what schedules do by group size and share of long responses."""
    lines = [
        "## By group size and share of long responses",
        "",
        "256 responses of one worker; a long one has more than half the tokens of the longest. Groups: share of those "
        "with a long response. Reach: longest response of the group at the quantile 1 / (1 + extra), over the longest "
        f"of all, at {', '.join(f'{extra:g}' for extra in EXTRAS)}. Then seconds over the synchronous ones, 7B plain / "
        "7B head / 23M plain; in brackets steps saved, and tokens thrown away if any. Those with `%` are drawn one by "
        "one.",
        "",
    ]
    cases: dict[tuple[str, int], list[Mapping[str, Any]]] = {}
    for row in [row for row in rows if row["workers"] == 1]:
        cases.setdefault((row["lengths"], row["size"]), []).append(row)
    cells = []
    for (name, size), (first, *others) in sorted(cases.items(), key=lambda case: case[1][0]["groups"]):
        reach = " / ".join(f"{each:.2f}" for each in first["reach"].values())
        cells.append([name, size, f"{first['groups']:.0%}", reach, *map(_summary, others)])
    header = ["lengths", "group", "groups", "reach", *(row["schedule"] for row in others)]
    return lines + table(header, cells)


def _summary(row: Mapping[str, Any]) -> str:
    relative = " / ".join(f"{row['relative'][name]:.2f}" for name in ("7B, plain", "7B, head", "23M, plain"))
    thrown = f", {row['thrown_away']:.0%}" * (row["thrown_away"] > 0)
    return f"{relative} ({row['saved_steps']:.0%}{thrown})"
